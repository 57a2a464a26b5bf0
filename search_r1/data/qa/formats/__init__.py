"""One module for each format of rows: `KEYS`, which identify it, and `fields(row)`, which reads a row.

A row has the format of the first module whose keys it all has. A `ValueError` from `fields` means a bad row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from search_r1.data.qa.formats import (
    bamboogle,
    flashrag,
    hotpotqa,
    musique,
    plain,
    popqa,
    strategyqa,
    triviaqa,
)

FORMATS = (flashrag, popqa, musique, hotpotqa, strategyqa, triviaqa, bamboogle, plain)


def format_of(rows: Iterable[Mapping[str, Any]]) -> ModuleType | None:
    """The format of the first row with a known format."""
    return next((found for row in rows for found in FORMATS if row.keys() >= found.KEYS), None)


def known_formats() -> str:
    return "; ".join(f"{found.__name__.rpartition('.')[2]} ({', '.join(sorted(found.KEYS))})" for found in FORMATS)
