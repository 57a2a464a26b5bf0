"""`python -m verl.trainer.plan` runs `verl.planning.plan`."""

import sys

from verl.planning.plan.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
