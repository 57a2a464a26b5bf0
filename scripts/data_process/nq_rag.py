"""Natural Questions with retrieved passages in the prompt: train.parquet and test.parquet."""

from __future__ import annotations

import sys

from search_r1.data.qa.command_line import PromptScript, main

SCRIPT = PromptScript("./data/nq_rag", base="rag", splits=("train", "test"), with_context=True)

if __name__ == "__main__":
    sys.exit(main(__doc__, SCRIPT))
