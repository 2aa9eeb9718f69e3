"""``python -m funcacc.cli`` is the ``funcacc`` command."""

import sys

from funcacc.cli import main

if __name__ == "__main__":
    sys.exit(main())
