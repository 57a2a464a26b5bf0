"""Natural Questions as prompts to be answered without searching: train.parquet and test.parquet."""

from __future__ import annotations

import sys

from search_r1.data.qa.command_line import PromptScript, main

SCRIPT = PromptScript("./data/nq", base="r1", splits=("train", "test"))

if __name__ == "__main__":
    sys.exit(main(__doc__, SCRIPT))
