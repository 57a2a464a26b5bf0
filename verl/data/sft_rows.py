"""Rows of the supervised warm start: segments of text, or of the exact ids that a policy sampled, or conversations.

A file is Parquet or JSONL. It has `segments` list<struct<source, text[, ids]>> or `messages` with optional `tools`
(`verl.data.conversations`), and optionally `phase` ("lm" or "policy").

A row of segments without ids is tokenised segment by segment, without adding special tokens. Its texts are trusted:
they may contain the control tokens of a chat, and these are tokens. A row with ids is trained on exactly these ids; the
tokenizer must decode them to the text. Such a row is one sequence. A further sequence of a rollout
(`verl.protocol.Trajectory.sequences`) begins with a segment of source "context" in place of the prompt. It is never
trained on: what it repeats is in another row.

A conversation is as many sequences as a rollout with its messages would have. Its texts are text from outside: no
control token comes out of them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from long_task import Progress
from text_file import read_text
from verl.data.files import file_list, read_table
from verl.errors import ConfigError, DataError, VerlError, translated

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from verl.agent.formats import Format
    from verl.agent.formats.chat import Thinking
    from verl.config.sections.schema import SftConfig
    from verl.data.conversations import ConversationRow
    from verl.protocol import TrainBatch

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


def read_rows(files: str | Sequence[str], key: str = "data.train_files") -> list[Row | ConversationRow]:
    """All rows of the Parquet and JSONL files, checked. Raises DataError naming file, row and column or message; `key`
    is the setting with the files."""
    paths = file_list(files)
    rows = [row for path in paths for row in _read_file(path, key)]
    if not rows:
        raise DataError(f"{key}: no rows in {', '.join(map(str, paths)) or 'no file at all'}")
    return rows


def format_for(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row | ConversationRow],
    thinking: Thinking = "template",
    options: Mapping[str, Any] | None = None,
) -> Format | None:
    """The format in which the conversations among `rows` are written; None if there is none. `thinking` and `options`
    are those of `format_of`. Raises ConfigError, which names a row, if the chat template cannot write them."""
    conversations = [row for row in rows if not isinstance(row, Row)]
    if not conversations:
        return None
    from verl.agent.formats import format_of

    row = next((row for row in conversations if row.needs_tools), conversations[0])
    place = f"{row.where}, {row.needs_tools or 'messages'}"
    with translated(ConfigError, lambda error: ConfigError(f"{place}: {error}")):
        return format_of(tokenizer, bool(row.needs_tools), thinking=thinking, options=options)


def tokenise(tokenizer: PreTrainedTokenizerBase, row: Row, phase: str, max_length: int) -> TokenisedRow:
    """Tokenise each segment by itself. The mask has all tokens but the first and those of a context (lm), or policy
    tokens only (policy).

    Raises DataError for a row that is too long, has nothing to train on, or has the ids of another tokenizer.
    """
    return _tokenised(row.sources, _ids_of_segments(tokenizer, row), phase, max_length, row.where)


def tokenise_conversation(form: Format, row: ConversationRow, phase: str, max_length: int) -> list[TokenisedRow]:
    """The sequences of a conversation with something to train on, each up to its last turn that is trained.

    The ids are those of a rollout. In phase policy, the mask has the trained turns, each in one sequence, from the
    first token after the generation prompt to the token that ends the turn; in phase lm it has all tokens but the
    first, those of a context and those of turns that are not trained. Raises DataError, which names the row and the
    message, for a conversation that the chat template cannot write, and for a sequence that is too long.
    """
    from verl.agent.formats.conversation import write_conversation

    with translated(VerlError, lambda error: DataError(f"{row.where}, {error}")):
        sequences = write_conversation(form, row.messages, row.tools)
    found: list[TokenisedRow] = []
    for number, sequence in enumerate(sequences):
        last = max((place for place, part in enumerate(sequence) if part.message in row.trained), default=-1)
        parts = sequence[: last + 1]
        # a turn that is not trained is history, as what a context repeats
        untrained = [part.message is not None and part.message not in row.trained for part in parts]
        sources = ["context" if left else part.source for part, left in zip(parts, untrained, strict=True)]
        where = row.where if len(sequences) == 1 else f"{row.where}, sequence {number}"
        if parts:
            found.append(_tokenised(sources, [part.ids for part in parts], phase, max_length, where))
    return found


def _tokenised(
    sources: Sequence[str], ids_of_parts: Sequence[Sequence[int]], phase: str, max_length: int, where: str
) -> TokenisedRow:
    import torch

    # Trained are the policy's tokens, and in phase lm also all others that are no context.
    ids: list[int] = []
    mask: list[bool] = []
    for source, part_ids in zip(sources, ids_of_parts, strict=True):
        ids += part_ids
        mask += [source == "policy" or (phase == "lm" and source != "context")] * len(part_ids)
    if len(ids) > max_length:
        raise DataError(
            f"{where}: {len(ids)} tokens are more than data.max_length={max_length}; raise it, or take the row out"
        )
    if not any(mask[1:]):
        raise DataError(f"{where}: there is nothing to train on in phase {phase!r}")
    mask[0] = False  # nothing comes before it that could predict it
    return TokenisedRow(torch.tensor(ids), torch.tensor(mask), where)


def _ids_of_segments(tokenizer: PreTrainedTokenizerBase, row: Row) -> Sequence[Sequence[int]]:
    from verl.agent.text import check_decoding

    if row.ids is None:
        return list(tokenizer(list(row.texts), add_special_tokens=False)["input_ids"])
    # Stored ids are trained as they were sampled, which makes sense only if they are this tokenizer's.
    for ids, text in zip(row.ids, row.texts, strict=True):
        try:
            check_decoding(tokenizer, ids, text)
        except DataError as error:
            raise DataError(
                f"{row.where}, column 'segments': {error}; train from the model that sampled, or leave the ids out "
                "(export the trajectories with --text_only)"
            ) from error
    return row.ids


def _read_file(path: Path, key: str) -> Iterator[Row | ConversationRow]:
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; set {key} to a Parquet or JSONL file with a column 'segments' or 'messages'"
        )
    for where, values in _jsonl_rows(path) if path.suffix.lower() == ".jsonl" else _parquet_rows(path):
        phase = values.get("phase")
        if phase is not None and phase not in PHASES:
            raise DataError(f"{where}, column 'phase': {phase!r} is neither 'lm' nor 'policy'")
        if "messages" in values:
            from verl.data.conversations import conversation_row

            yield conversation_row(values["messages"], values.get("tools"), phase, where)
        else:
            yield _row(values["segments"], phase, where)


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and values of each row, those of `messages` and `tools` without nulls: a struct has one for each field that
    only other rows have."""
    table = read_table(path)
    _check_columns(path, table.column_names)
    used = [name for name in ("segments", "messages", "tools", "phase") if name in table.column_names]
    for number, values in enumerate(table.select(used).to_pylist()):
        for name in ("messages", "tools"):
            if name in values:
                values[name] = _without_nulls(values[name])
        yield f"{path}: row {number}", values


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from verl.agent.formats.calls import Malformed, read_json

    # Lines end at a line feed only: `splitlines` also cuts at characters (U+2028) that JSON allows inside a text.
    # Rows are counted without empty lines and from 0, as those of Parquet files; lines as editors count them.
    lines = enumerate(read_text(path, DataError).split("\n"), start=1)
    for number, (line_number, line) in enumerate((at, line) for at, line in lines if line.strip()):
        where = f"{path}: row {number} (line {line_number})"
        try:
            values = read_json(line)
        except Malformed as error:
            raise DataError(f"{where}: no JSON: {error}; correct the line") from error
        if not isinstance(values, dict):
            raise DataError(f"{where}: it is {values!r:.100}; a row is a JSON object with 'segments' or 'messages'")
        _check_columns(where, list(values))
        yield where, values


def _check_columns(where: Path | str, names: Sequence[str]) -> None:
    if "segments" in names and "messages" in names:
        raise DataError(
            f"{where}: it has the columns 'segments' and 'messages', which are two forms of a row; keep one"
        )
    if "segments" not in names and "messages" not in names:
        raise DataError(
            f"{where}: column 'segments' is missing; its columns are {', '.join(names)}. A row has segments or messages"
        )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _row(segments: Any, phase: str | None, where: str) -> Row:
    from verl.protocol import Source

    if not segments or not isinstance(segments, list):
        raise DataError(f"{where}, column 'segments' is empty, or no list")
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


# Rows become the batches of a run.


class Batches:
    """Batches of a step: rows of the step's phase in random order, every row once before any is repeated.

    Each sequence of a conversation is a row.
    """

    def __init__(
        self,
        config: SftConfig,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Row | ConversationRow],
        shown: bool = False,
    ) -> None:
        """Tokenises all rows; `shown`: with a progress bar, or lines in a file.

        Raises DataError for a phase without rows, for a row that is too long or untrained, and for a conversation that
        the chat template cannot write; ConfigError for such a chat template.
        """
        self.batch_size = config.data.train_batch_size
        self.num_lm_steps = round(config.data.lm_fraction * config.trainer.total_training_steps)
        num_policy_steps = config.trainer.total_training_steps - self.num_lm_steps
        form = format_for(tokenizer, rows, config.data.thinking, config.data.apply_chat_template_kwargs)
        max_length = config.data.max_length
        # A phase trains the rows that name it and those that name none. Each phase has its own masks and its own order.
        self._orders: dict[str, Iterator[int]] = {}
        self._rows: dict[str, list[TokenisedRow]] = {}
        for phase, num_steps in zip(PHASES, (self.num_lm_steps, num_policy_steps), strict=True):
            if not num_steps:
                continue
            chosen = [row for row in rows if row.phase in (None, phase)]
            if not chosen:
                raise DataError(f"data.train_files: no row has phase {phase!r}, but {num_steps} steps need them")
            with Progress(f"tokenised for phase {phase}", len(chosen), unit="rows", shown=shown) as progress:
                self._rows[phase] = _sequences(tokenizer, form, chosen, phase, max_length, progress)
            self._orders[phase] = _endless_order(len(self._rows[phase]), config.trainer.seed + PHASES.index(phase))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all rows as they are trained; it tells a resumed run whether it has those of the earlier one."""
        found = hashlib.sha256()
        for phase, rows in self._rows.items():
            found.update(f"{phase} {len(rows)}".encode())
            for row in rows:
                found.update(row.ids_L.numpy().tobytes() + row.loss_mask_L.numpy().tobytes())
        return found.hexdigest()

    def check_ids(self, num_embeddings: int) -> None:
        """Raise DataError for the first row with a token that a model of so many embeddings does not have."""
        _check_ids(itertools.chain.from_iterable(self._rows.values()), num_embeddings)

    def next(self, step: int) -> tuple[str, TrainBatch]:
        """Phase and batch of `step` (from 0). Call it once for each step, in order."""
        phase = self._phase(step)
        return phase, _batch([self._rows[phase][next(self._orders[phase])] for _ in range(self.batch_size)])

    def skip(self, num_steps: int) -> None:
        """Leave out the batches of the first steps; before the first `next`."""
        for step in range(num_steps):
            for _ in range(self.batch_size):
                next(self._orders[self._phase(step)])

    def _phase(self, step: int) -> str:
        return "lm" if step < self.num_lm_steps else "policy"


def held_out_batches(
    config: SftConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row | ConversationRow],
    num_embeddings: int,
    shown: bool = False,
) -> list[TrainBatch]:
    """The rows of phase policy in batches, in order. `shown` and errors as in `Batches` and its `check_ids`."""
    form = format_for(tokenizer, rows, config.data.thinking, config.data.apply_chat_template_kwargs)
    chosen = [row for row in rows if row.phase != "lm"]
    with Progress("held-out rows tokenised", len(chosen), unit="rows", shown=shown and bool(chosen)) as progress:
        found = _sequences(tokenizer, form, chosen, "policy", config.data.max_length, progress)
    if rows and not found:
        raise DataError("data.val_files: no row has phase 'policy', on which the held-out loss is measured")
    _check_ids(found, num_embeddings)
    size = config.data.train_batch_size
    return [_batch(found[start : start + size]) for start in range(0, len(found), size)]


def held_out_digest(held_out: Sequence[TrainBatch]) -> str | None:
    """SHA-256 of held-out rows, whatever the batch size; None without rows. Losses compare only on the same ones."""
    if not held_out:
        return None
    found = hashlib.sha256()
    for part in ("lengths", "ids", "loss_mask"):
        for batch in held_out:
            found.update((batch.lengths_B if part == "lengths" else batch.tokens[part]).numpy().tobytes())
    return found.hexdigest()


def _sequences(
    tokenizer: PreTrainedTokenizerBase,
    form: Format | None,
    rows: Iterable[Row | ConversationRow],
    phase: str,
    max_length: int,
    progress: Progress,
) -> list[TokenisedRow]:
    found: list[TokenisedRow] = []
    for row in rows:
        if isinstance(row, Row):
            found.append(tokenise(tokenizer, row, phase, max_length))
        elif form is not None:
            found += tokenise_conversation(form, row, phase, max_length)
        progress.update()
    return found


def _check_ids(rows: Iterable[TokenisedRow], num_embeddings: int) -> None:
    for row in rows:
        if (largest := int(row.ids_L.max())) >= num_embeddings:
            raise DataError(
                f"{row.where}: it has token {largest}, but the model has embeddings for 0 to {num_embeddings - 1}; "
                "use its own tokenizer, or enlarge the model's embedding (resize_token_embeddings) and save it"
            )


def _batch(rows: Sequence[TokenisedRow]) -> TrainBatch:
    import torch

    from verl.protocol import TrainBatch

    lengths_B = torch.tensor([len(row.ids_L) for row in rows], dtype=torch.int64)
    masks = [row.loss_mask_L for row in rows]
    return TrainBatch(lengths_B, {"ids": torch.cat([row.ids_L for row in rows]), "loss_mask": torch.cat(masks)})


def _endless_order(num_rows: int, seed: int) -> Iterator[int]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(num_rows, generator=generator).tolist()
