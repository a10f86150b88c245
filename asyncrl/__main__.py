"""`python -m asyncrl` is `asyncrl`; the launcher starts its processes this way."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
