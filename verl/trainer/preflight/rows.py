"""Rows of the prompt files for trying things out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from verl.config import Config
from verl.data.files import file_list, read_table


def first_row(config: Config) -> dict[str, Any]:
    """The first row of the training files."""
    path = file_list(config.data.train_files)[0]
    row: dict[str, Any] = next(pq.ParquetFile(path).iter_batches(batch_size=1)).to_pylist()[0]
    return row


def first_rows(files: str | list[str]) -> Iterator[dict[str, Any]]:
    """The first row of each data source."""
    seen = set()
    for path in file_list(files):
        table = read_table(path, required=("data_source", "reward_model"))
        for number, source in enumerate(table.column("data_source").to_pylist()):
            if source not in seen:
                seen.add(source)
                yield table.slice(number, 1).to_pylist()[0]
