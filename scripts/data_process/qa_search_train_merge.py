"""The training questions of some sets in one train.parquet, for a search agent."""

from __future__ import annotations

import sys

from search_r1.data.qa.command_line import PromptScript, main

SCRIPT = PromptScript("./data/nq_search", base="search_r1", splits=("train",), several_sets=True)

if __name__ == "__main__":
    sys.exit(main(__doc__, SCRIPT))
