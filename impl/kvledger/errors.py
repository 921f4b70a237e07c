"""Every exception that kvledger raises on purpose. What may live here: exception classes, nothing else."""


class KvledgerError(Exception):
    """The base of them all."""


class ProtocolError(KvledgerError):
    """A rule of the protocol was broken; nothing was changed. Never expected; always a bug in the caller or here."""

    def __init__(
        self,
        message: str,
        *,
        job_id: int | None = None,
        rank: int | None = None,
        action: str | None = None,
    ) -> None:
        self.job_id = job_id
        self.rank = rank
        self.action = action
        named = (("action", action), ("job", job_id), ("rank", rank))
        where = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        super().__init__(f"{message} ({where})" if where else message)


class ConfigError(KvledgerError):
    """A setting cannot be used. Names the field, its value, where it came from and what to do."""

    def __init__(self, field: str, value: object, remedy: str, source: str | None = None) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        self.source = source
        origin = f" (from {source})" if source else ""
        super().__init__(f"kvledger setting {field} = {value!r}{origin}: {remedy}")

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[object, ...]]:
        return type(self), (self.field, self.value, self.remedy, self.source)


class StoreError(KvledgerError):
    """Mooncake, or the embedded store, refused an operation. Names the operation, the code if any, and what to do."""

    def __init__(self, operation: str, code: int | None, remedy: str) -> None:
        self.operation = operation
        self.code = code
        self.remedy = remedy
        shown = "" if code is None else f" (Mooncake code {code})"
        super().__init__(f"Mooncake {operation} failed{shown}: {remedy}")

    def __reduce__(self) -> tuple[type["StoreError"], tuple[object, ...]]:
        return type(self), (self.operation, self.code, self.remedy)


class StuckCopyError(KvledgerError):
    """A copy inside this process, into KV blocks, does not end. Going on could use bytes that are still being written."""

    def __init__(self, job_id: int, waited_s: float) -> None:
        self.job_id = job_id
        self.waited_s = waited_s
        super().__init__(
            f"job {job_id}: copying loaded bytes into KV blocks has not ended after {waited_s:g} s (load_timeout_s + "
            "transfer_timeout_s); the device seems to hang: look at its driver's log, and restart this engine"
        )

    def __reduce__(self) -> tuple[type["StuckCopyError"], tuple[object, ...]]:
        return type(self), (self.job_id, self.waited_s)
