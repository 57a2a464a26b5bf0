"""Prompts from parquet files, in a seeded order that can be saved and resumed."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.files import check_files, file_list, read_table
from verl.errors import DataError
from verl.protocol import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, str]]
_ENCODE_ROWS = 1024  # rows tokenised in one call


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """The token ids that an episode starts from, for training, validation and `infer.py` alike.

    Applies the tokenizer's chat template (with the generation prompt) if it has one; else encodes the text of the
    single message as it is. No BOS or EOS beyond what the template writes. Raises `DataError` for a prompt without
    content, and for several messages without a chat template.
    """
    return _encode_texts(tokenizer, [_prompt_text(tokenizer, messages)])[0]


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _prompt_text(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    if not messages or any(message is None or not message["content"] for message in messages):
        raise DataError("the prompt is empty, or has a message without content")
    if tokenizer.chat_template is not None:
        chat = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    if len(messages) != 1:
        raise DataError(
            f"{len(messages)} messages in a prompt need a tokenizer with a chat template; this one has none"
        )
    return messages[0]["content"]


class PromptSource:
    """An endless supply of the prompts in parquet files, each once per epoch.

    `num_rows` draws a seeded subset (kept in file order). Prompts longer than `max_start_length` tokens are an error;
    with `filter_overlong` they are skipped, and their number is logged. With `shuffle`, each epoch has its own order,
    which depends only on `seed` and the epoch number. Raises `DataError` naming file, row (from 0) and column.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        max_start_length: int,
        shuffle: bool = True,
        seed: int = 0,
        num_rows: int | None = None,
        filter_overlong: bool = False,
    ) -> None:
        total = check_files(files, prompt_key)
        self._paths = file_list(files)
        self._tables = [read_table(path, required=("data_source", "reward_model")) for path in self._paths]
        self._shuffle, self._seed = shuffle, seed
        self._rows = self._subset(num_rows, total)
        self._ids = self._encode(tokenizer, prompt_key)
        self._check_lengths(prompt_key, max_start_length, filter_overlong)
        self._epoch = self._position = 0
        self._again: list[int] = []  # drawn before, and to be drawn first
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._rows)

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts; they may span the end of an epoch."""
        return [self._prompt(self._advance()) for _ in range(n)]

    def all(self) -> list[Prompt]:
        """Every prompt in file order, without moving the position of `next`."""
        return [self._prompt(index) for index in range(len(self))]

    def state_dict(self, again: Sequence[Prompt] = ()) -> dict[str, Any]:
        """The position of `next`, and which prompts and seed it applies to. After a resume from this state, `next`
        first returns the prompts `again`."""
        indices = [prompt.index for prompt in again] + self._again
        place = {"epoch": self._epoch, "position": self._position, "again": indices}
        return place | {"seed": self._seed, "num_prompts": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`. Raises `DataError` if it belongs to other prompts or another seed."""
        for name, value in (("seed", self._seed), ("num_prompts", len(self))):
            if state[name] != value:
                raise DataError(f"cannot resume the order of prompts: {name} was {state[name]} and is {value}")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)
        self._again = list(state.get("again", []))

    def _advance(self) -> int:
        if self._again:
            return self._again.pop(0)
        if self._position == len(self):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        self._position += 1
        return self._order[self._position - 1]

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _subset(self, num_rows: int | None, total: int) -> list[tuple[int, int]]:
        """(table, row) pairs in file order."""
        rows = [(table, row) for table in range(len(self._tables)) for row in range(self._tables[table].num_rows)]
        if num_rows is None:
            return rows
        if not 0 < num_rows <= total:
            names = ", ".join(map(str, self._paths))
            raise DataError(f"{num_rows} rows are requested, but {names} has {total}; give a number from 1 to {total}")
        return sorted(random.Random(self._seed).sample(rows, num_rows))

    def _encode(self, tokenizer: PreTrainedTokenizerBase, prompt_key: str) -> list[np.ndarray]:
        """int32 arrays: Python lists of a large training set would take gigabytes."""
        encoded: list[np.ndarray] = []
        for start in range(0, len(self._rows), _ENCODE_ROWS):
            texts = [self._text(tokenizer, row, prompt_key) for row in self._rows[start : start + _ENCODE_ROWS]]
            encoded += [np.asarray(ids, dtype=np.int32) for ids in _encode_texts(tokenizer, texts)]
        return encoded

    def _text(self, tokenizer: PreTrainedTokenizerBase, row: tuple[int, int], prompt_key: str) -> str:
        messages = self._tables[row[0]].column(prompt_key)[row[1]].as_py()
        try:
            return _prompt_text(tokenizer, messages)
        except DataError as error:
            raise DataError(f"{self._place(row)}, column {prompt_key!r}: {error}") from error

    def _check_lengths(self, prompt_key: str, max_start_length: int, filter_overlong: bool) -> None:
        kept = [index for index, ids in enumerate(self._ids) if len(ids) <= max_start_length]
        if len(kept) == len(self._ids):
            return
        if not filter_overlong:
            index = next(index for index, ids in enumerate(self._ids) if len(ids) > max_start_length)
            raise DataError(
                f"{self._place(self._rows[index])}, column {prompt_key!r}: the prompt has {len(self._ids[index])} "
                f"tokens, but data.max_start_length is {max_start_length}; raise it, or drop such rows with "
                "data.filter_overlong_prompts=true"
            )
        log.warning(
            "%s: dropped %d of %d prompts, longer than data.max_start_length=%d tokens",
            ", ".join(map(str, self._paths)), len(self._ids) - len(kept), len(self._ids), max_start_length,
        )  # fmt: skip
        if not kept:
            raise DataError(f"{self._paths[0]}: every prompt is longer than data.max_start_length={max_start_length}")
        self._rows, self._ids = [self._rows[i] for i in kept], [self._ids[i] for i in kept]

    def _prompt(self, index: int) -> Prompt:
        table, row = self._rows[index]
        values: dict[str, Any] = self._tables[table].slice(row, 1).to_pylist()[0]
        return Prompt(tuple(self._ids[index].tolist()), values["data_source"], values, index)

    def _place(self, row: tuple[int, int]) -> str:
        return f"{self._paths[row[0]]}: row {row[1]}"
