"""The test questions of some sets in one test.parquet: of each its test split, else dev, else train."""

from __future__ import annotations

import sys

from search_r1.data.qa.command_line import PromptScript, main

SCRIPT = PromptScript("./data/nq_search", base="search_r1", splits=("test",), several_sets=True)

if __name__ == "__main__":
    sys.exit(main(__doc__, SCRIPT))
