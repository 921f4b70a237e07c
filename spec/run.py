#!/usr/bin/env python3
"""Check the TLA+ model with TLC. Without arguments: the set that CI runs, with a table."""

import sys

from spectools.main import main

if __name__ == "__main__":
    sys.exit(main())
