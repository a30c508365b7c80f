"""`python -m instrument`: the same as the command `instrument`."""

import sys

from instrument.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
