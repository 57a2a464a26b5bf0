"""Rows of the supervised warm start: segments of text, or of the exact ids that a policy sampled.

Parquet columns: `segments` list<struct<source, text[, ids]>>, and optionally `phase` ("lm" or "policy"). A row without
ids is tokenised segment by segment, without adding special tokens. Its texts are trusted: they may contain the control
tokens of a chat, and these are tokens. A row with ids is trained on exactly these ids; the tokenizer must decode them
to the text.

A row is one sequence. A further sequence of a rollout (`verl.protocol.Trajectory.sequences`) begins with a segment of
source "context" in place of the prompt. It is never trained on: what it repeats is in another row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.data.files import file_list, read_table
from verl.errors import DataError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

PHASES = ("lm", "policy")


@dataclass(frozen=True)
class Row:
    """One training row as stored; `where` names file and row number for error messages."""

    sources: tuple[str, ...]
    texts: tuple[str, ...]
    phase: str | None
    where: str
    ids: tuple[tuple[int, ...], ...] | None = None  # of each segment; None: the text is to be tokenised


@dataclass(frozen=True)
class TokenisedRow:
    """A row as a model is trained on it: `ids_L` int64 and `loss_mask_L` bool; `where` as in `Row`."""

    ids_L: torch.Tensor
    loss_mask_L: torch.Tensor
    where: str


def read_rows(files: str | Sequence[str]) -> list[Row]:
    """All rows of the parquet files. Raises DataError naming file, row and column."""
    paths = file_list(files)
    rows = [row for path in paths for row in _read_file(path)]
    if not rows:
        raise DataError(f"data.train_files: no rows in {', '.join(map(str, paths)) or 'no file at all'}")
    return rows


def tokenise(tokenizer: PreTrainedTokenizerBase, row: Row, phase: str, max_length: int) -> TokenisedRow:
    """Tokenise each segment by itself. The mask has all tokens but the first and those of a context (lm), or policy
    tokens only (policy).

    Raises DataError for a row that is too long, has nothing to train on, or has the ids of another tokenizer.
    """
    import torch

    ids: list[int] = []
    mask: list[bool] = []
    for source, segment_ids in zip(row.sources, _ids_of_segments(tokenizer, row), strict=True):
        ids += segment_ids
        mask += [source == "policy" or (phase == "lm" and source != "context")] * len(segment_ids)
    if len(ids) > max_length:
        raise DataError(f"{row.where}: {len(ids)} tokens are more than data.max_length={max_length}")
    if not any(mask[1:]):
        raise DataError(f"{row.where}: there is nothing to train on in phase {phase!r}")
    mask[0] = False  # nothing comes before it that could predict it
    return TokenisedRow(torch.tensor(ids), torch.tensor(mask), row.where)


def _ids_of_segments(tokenizer: PreTrainedTokenizerBase, row: Row) -> Sequence[Sequence[int]]:
    from verl.agent.text import check_decoding

    if row.ids is None:
        return list(tokenizer(list(row.texts), add_special_tokens=False)["input_ids"])
    for ids, text in zip(row.ids, row.texts, strict=True):
        try:
            check_decoding(tokenizer, ids, text)
        except DataError as error:
            raise DataError(
                f"{row.where}, column 'segments': {error}; train from the model that sampled, or leave the ids out "
                "(export the trajectories with --text_only)"
            ) from error
    return row.ids


def _read_file(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise DataError(f"{path}: no such file; set data.train_files to a parquet file with a column 'segments'")
    table = read_table(path)
    if "segments" not in table.column_names:
        raise DataError(f"{path}: column 'segments' is missing; its columns are {', '.join(table.column_names)}")
    phases = table["phase"].to_pylist() if "phase" in table.column_names else [None] * len(table)
    for number, (segments, phase) in enumerate(zip(table["segments"].to_pylist(), phases, strict=True)):
        yield _row(segments, phase, f"{path}: row {number}")


def _row(segments: Any, phase: str | None, where: str) -> Row:
    from verl.protocol import Source

    if phase is not None and phase not in PHASES:
        raise DataError(f"{where}, column 'phase': {phase!r} is neither 'lm' nor 'policy'")
    if not segments:
        raise DataError(f"{where}, column 'segments' is empty")
    for segment in segments:
        if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
            raise DataError(f"{where}, column 'segments': {segment!r} is not a struct of the strings source and text")
        if segment.get("source") not in list(Source):
            raise DataError(f"{where}, column 'segments': source {segment.get('source')!r} is not {', '.join(Source)}")
    sources, texts = tuple(s["source"] for s in segments), tuple(s["text"] for s in segments)
    row = Row(sources, texts, phase, where, _stored_ids(segments, where))
    _check_context(row)
    return row


def _check_context(row: Row) -> None:
    """Raise DataError for a context that does not begin a sequence; segments are counted from 1."""
    if "context" in row.sources[1:]:
        number = row.sources.index("context", 1) + 1
        raise DataError(
            f"{row.where}, column 'segments': segment {number} is a context; a context begins a "
            "sequence, and a row is one: put it and what follows into a row of their own"
        )
    if row.sources[0] != "context":
        return
    if "prompt" in row.sources:
        number = row.sources.index("prompt") + 1
        raise DataError(
            f"{row.where}, column 'segments': segment {number} is a prompt after a context; "
            "a row begins with one of them"
        )
    if not (row.texts[0] if row.ids is None else row.ids[0]):
        raise DataError(
            f"{row.where}, column 'segments': the context is empty; it is what the policy saw before its turn"
        )


def _stored_ids(segments: list[dict[str, Any]], where: str) -> tuple[tuple[int, ...], ...] | None:
    stored = [segment["ids"] for segment in segments if segment.get("ids") is not None]
    if not stored:
        return None
    valid = (isinstance(ids, list) and all(isinstance(token, int) and token >= 0 for token in ids) for ids in stored)
    if len(stored) < len(segments) or not all(valid):
        raise DataError(f"{where}, column 'segments': ids must be integers from 0, in all segments or in none")
    return tuple(tuple(ids) for ids in stored)
