"""Show which gold answers a corpus contains, or add the missing gold passages: see `search_r1.data.corpus`."""

import sys

from search_r1.data.corpus.command_line import main

if __name__ == "__main__":
    sys.exit(main())
