"""`python -m explicit_dropout`: the command line."""

import sys

from explicit_dropout.cli import main

if __name__ == "__main__":
    sys.exit(main())
