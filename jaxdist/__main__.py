"""`python -m jaxdist` is `jaxdist`."""

import sys

from jaxdist.cli import main

if __name__ == "__main__":
    sys.exit(main())
