"""`python -m verl.trainer.preflight` runs `verl.trainer.start_checks`."""

import sys

from verl.trainer.start_checks.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
