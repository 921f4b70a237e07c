"""`./dev spec`: check the TLA+ model with TLC. Without arguments: the set that CI runs, with a table."""

import sys

from conformance.model.main import main

if __name__ == "__main__":
    sys.exit(main())
