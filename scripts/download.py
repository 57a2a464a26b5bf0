"""Fetch corpus, indexes and question sets from the Hugging Face hub.

    .venv/bin/python scripts/download.py --save_path data --what corpus,e5

Goes on where it stopped, checks every file against the hub's checksum, joins the parts of an index and unpacks the
corpus. Without a network it says what to place where.
"""

from __future__ import annotations

import sys

from search_r1.data.hub.download import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
