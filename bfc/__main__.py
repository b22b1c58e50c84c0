"""`python -m bfc` is the command `bfc`."""

import sys

from bfc_tools.command import main

if __name__ == "__main__":
    sys.exit(main())
