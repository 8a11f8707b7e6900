"""`python -m stretto`."""

import sys

from stretto.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
