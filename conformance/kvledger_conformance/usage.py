"""What is wrong with how the suite was called, said in two lines instead of a traceback."""


class UsageError(Exception):
    """The call cannot be carried out. `hint` says what to do."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint

    def __str__(self) -> str:
        return f"error: {self.args[0]}\n\nhint: {self.hint}"
