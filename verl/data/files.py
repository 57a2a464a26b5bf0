"""Prompt files on disk: what a usable one looks like, checked from its footer alone (no torch, no rows read).

A row is `data_source: str`, `prompt: list<{role: str, content: str}>` and `reward_model: {ground_truth: ...}`; further
columns are kept for environments and rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl.errors import DataError


def check_files(files: str | Sequence[str], prompt_key: str = "prompt") -> int:
    """Raise `DataError`, naming file and column, unless every file can be trained on. Returns the number of rows."""
    paths = file_list(files)
    if not paths:
        raise DataError("no prompt file is given; set data.train_files and data.val_files to parquet files")
    return sum(_check_file(path, prompt_key) for path in paths)


def file_list(files: str | Sequence[str]) -> list[Path]:
    """The paths in `files`, which is one path or many, with `~` expanded."""
    return [Path(name).expanduser() for name in ([files] if isinstance(files, str) else files)]


def read_table(path: Path, required: Sequence[str] = ()) -> pa.Table:
    """All columns of one parquet file. Raises `DataError` when it cannot be read or a `required` column has a null."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error
    for column in required:
        row = pc.index(pc.is_null(table.column(column)), True).as_py()
        if row >= 0:
            raise DataError(f"{path}: row {row}, column {column!r}: is null")
    return table


def _check_file(path: Path, prompt_key: str) -> int:
    if not path.is_file():
        raise DataError(f"{path}: no such file; a prompt file is a parquet file made by scripts/data_process")
    try:
        # The file's footer has the number of rows and the types of all columns, so that no data is read for the check.
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: is not a parquet file: {error}") from error
    if metadata.num_rows == 0:
        raise DataError(f"{path}: has no rows")
    for column in (prompt_key, "data_source", "reward_model"):
        if column not in schema.names:
            raise DataError(f"{path}: column {column!r} is missing; its columns are {', '.join(schema.names)}")
    _check_type(path, schema, prompt_key, _is_messages, "a list of {role: string, content: string}")
    _check_type(path, schema, "data_source", _is_string, "a string")
    _check_type(path, schema, "reward_model", _has_ground_truth, "a struct with the field ground_truth")
    return int(metadata.num_rows)


def _check_type(
    path: Path, schema: pa.Schema, column: str, accepts: Callable[[pa.DataType], bool], must_be: str
) -> None:
    kind = schema.field(column).type
    if not accepts(kind):
        raise DataError(f"{path}: column {column!r} is {kind}, but must be {must_be}")


def _is_string(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_messages(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    types = {field.name: field.type for field in kind.value_type}
    return all(name in types and _is_string(types[name]) for name in ("role", "content"))


def _has_ground_truth(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) and kind.get_field_index("ground_truth") >= 0
