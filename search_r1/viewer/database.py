"""DuckDB over the Parquet files: queries run in threads, and are interrupted when nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import duckdb

from verl.errors import DataError

T = TypeVar("T")
Cursor = duckdb.DuckDBPyConnection

MEMORY = "256MB"
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": MEMORY,
    "threads": 2,
    "autoinstall_known_extensions": False,  # nothing is fetched
    "autoload_known_extensions": False,
    "preserve_insertion_order": False,  # every query that needs an order says which
}


class Database:
    """Queries files; stores nothing."""

    def __init__(self) -> None:
        self._connection = duckdb.connect(":memory:", config=_SETTINGS)
        self._connection.execute("SET parquet_metadata_cache = true")

    async def run(self, work: Callable[[Cursor], T]) -> T:
        """Run `work` in a thread, with its own cursor; cancelling interrupts its query. Raises DataError."""
        cursor = self._connection.cursor()
        try:
            return await asyncio.to_thread(work, cursor)
        except asyncio.CancelledError:
            cursor.interrupt()
            raise
        except duckdb.Error as error:
            raise DataError(f"cannot read trajectories: {error}") from error


def rows_of(cursor: Cursor, sql: str, values: list[Any]) -> list[dict[str, Any]]:
    """The result of a query, one dict per row."""
    found = cursor.execute(sql, values)
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
