"""`python -m verl.trainer.dry_run` runs `verl.planning.dry_run`."""

import sys

from verl.planning.dry_run.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
