"""`python -m page4.cli`: the same as the `page4` command."""

from __future__ import annotations

import sys

from page4.cli import main

if __name__ == "__main__":
    sys.exit(main())
