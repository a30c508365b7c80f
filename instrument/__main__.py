"""`python -m instrument`: the same as the command `instrument`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path[0] = sys.prefix  # not the current folder, which may hold a file loguru.py
    from instrument.cli.command import main

    sys.exit(main())
