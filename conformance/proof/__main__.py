"""`./dev prove`: prove the inductive invariants of `spec/`, for sets of any finite size."""

import sys

from conformance.proof.main import main

if __name__ == "__main__":
    sys.exit(main())
