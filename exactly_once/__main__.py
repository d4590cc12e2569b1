"""``python -m exactly_once``: the same as the command ``exactly-once``."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
