"""`python -m dflash_trt`."""

import sys

from dflash_trt.cli import main

if __name__ == "__main__":
    sys.exit(main())
