"""Natural Questions as prompts for a search agent: train.parquet and test.parquet."""

from __future__ import annotations

import sys

from search_r1.data.qa.command_line import PromptScript, main

SCRIPT = PromptScript("./data/nq_search", base="search_r1", splits=("train", "test"))

if __name__ == "__main__":
    sys.exit(main(__doc__, SCRIPT))
