"""Help for tests. Its asserts must hold under `python -O` too."""

import pytest

pytest.register_assert_rewrite("tests.support.engine", "tests.support.ranks")
