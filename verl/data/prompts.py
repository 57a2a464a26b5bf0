"""Prompts from parquet files, in a seeded order that can be saved and resumed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from verl.agent.messages import MessageEncoder, Messages
from verl.agent.text import whole_characters
from verl.data.files import check_files, file_list, read_table
from verl.errors import DataError
from verl.protocol import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

T = TypeVar("T")

_TAG = re.compile(r"</?\w[\w-]*>")
_ENCODE_ROWS = 1024  # rows tokenised in one call
_MOST_EQUAL = 255  # groups in a row that are counted, in a byte for each prompt


@dataclass(frozen=True)
class Curriculum:
    """How often a prompt is drawn whose last groups had equal rewards: it was always right or always wrong.

    If the rewards of its last group were all equal, an epoch draws it with `keep_probability`; each further such group
    in a row halves this, down to `min_keep_probability`. Other prompts are always drawn. An epoch draws at least
    `min_prompts`: once so many are skipped that no more than these are left, all that follow are drawn.
    """

    keep_probability: float
    min_keep_probability: float
    min_prompts: int

    def probability(self, num_equal: int) -> float:
        """The probability that an epoch draws a prompt whose last `num_equal` groups had equal rewards."""
        if num_equal == 0:
            return 1.0
        return max(self.min_keep_probability, self.keep_probability * 0.5 ** (num_equal - 1))


def first_of_each_tags(prompts: Iterable[tuple[T, Any, Any]]) -> Iterator[tuple[T, str]]:
    """Name and text of the first prompt of each set of tags, of prompts given by (name, messages, question).

    The text is that of all messages, without the question, which may name any tag. Prompts of which nothing is left are
    a set of their own.
    """
    seen = set()
    for name, messages, question in prompts:
        text = "\n".join(message["content"] or "" for message in messages or () if message)
        if isinstance(question, str):
            text = text.replace(question.strip(), "")
        if (kind := (bool(text), frozenset(_TAG.findall(text)))) not in seen:
            seen.add(kind)
            yield name, text


def _encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    whole = [whole_characters(text) for text in texts]
    return [list(ids) for ids in tokenizer(whole, add_special_tokens=False)["input_ids"]]


class PromptSource:
    """An endless supply of the prompts in parquet files, each once per epoch, or less often with a `curriculum`.

    The contents of messages are text from outside: of the tokenizer's added tokens, only the environment's own `tags`
    can come out of them. What looks like another is encoded by its characters, and a warning for each file says so.

    `prompt_ids` gives the ids of a prompt's messages, for an environment that writes them itself; None, or for
    messages of which it gives None, the tokenizer's chat template writes them.

    `num_rows` draws a seeded subset (kept in file order). Prompts longer than `max_start_length` tokens are an error;
    with `filter_overlong` they are skipped, and their number is logged. With `shuffle`, each epoch has its own order,
    which depends only on `seed` and the epoch number. Raises `DataError` naming file, row (from 0) and column.

    With a `curriculum`, whether an epoch draws a prompt depends only on `seed`, the epoch number, the prompt's index,
    what `observe` was told of it before, and how many the epoch has skipped.

    `digest` is the SHA-256 of the roles and texts of its rows, in file order. Unlike a digest of ids, it does not
    change with a chat template that writes the date.
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
        tags: tuple[str, ...] = (),
        prompt_ids: Callable[[Messages], tuple[int, ...] | None] | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        total = check_files(files, prompt_key)
        self._paths = file_list(files)
        self._tables = [read_table(path, required=("data_source", "reward_model")) for path in self._paths]
        self._prompt_key = prompt_key
        self._shuffle, self._seed = shuffle, seed
        self._rows = self._subset(num_rows, total)
        self._ids = self._encode(tokenizer, MessageEncoder(tokenizer, tags), prompt_ids)
        self._check_lengths(max_start_length, filter_overlong)
        # Where the supply stands, and what the curriculum knows.
        self._epoch = self._position = 0
        self._again: list[int] = []  # prompts that `next` returns once more, before any other
        self._order = self._order_of(0)
        self._curriculum = curriculum
        self._num_equal = np.zeros(len(self), dtype=np.uint8)  # by prompt: its last groups with equal rewards, in a row
        self._num_skipped = 0  # in this epoch
        self._draws: list[bool] = []  # of the prompts since the last `curriculum_metrics`: whether each was drawn

    def __len__(self) -> int:
        """The number of prompts in an epoch."""
        return len(self._rows)

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts; they may span the end of an epoch."""
        return [self._prompt(self._advance()) for _ in range(n)]

    def observe(self, prompt: Prompt, has_equal_rewards: bool) -> None:
        """Tell the curriculum of a group of `prompt`, one of this source: whether its rewards were all equal."""
        index = prompt.index
        assert index is not None, "a prompt of a source has its index"
        counted = min(int(self._num_equal[index]) + 1, _MOST_EQUAL)
        self._num_equal[index] = counted if has_equal_rewards else 0

    def curriculum_metrics(self) -> dict[str, float]:
        """The metrics `curriculum/skipped`, the share of skipped prompts among those whose turn came since the last
        call, and `curriculum/zero_variance_prompts`, the share of all prompts whose last group had equal rewards.
        """
        draws, self._draws = self._draws, []
        skipped = {"curriculum/skipped": draws.count(False) / len(draws)} if draws else {}
        return skipped | {"curriculum/zero_variance_prompts": np.count_nonzero(self._num_equal) / len(self)}

    def all(self) -> list[Prompt]:
        """Every prompt in file order, without moving the position of `next`."""
        return [self._prompt(index) for index in range(len(self))]

    def kinds(self) -> Iterator[tuple[str, Prompt]]:
        """One prompt of each kind, and where it is ("FILE: row N"): what works for it should work for all of its kind.

        Rows are of one kind if they have the same `data_source`, and if their `reward_model` and `extra_info` are equal
        in fields and types, and in what is null or empty.
        """
        return ((place, self._prompt(index)) for place, index in self._kinds)

    @functools.cached_property
    def _kinds(self) -> list[tuple[str, int]]:
        """Place and index of a prompt of each kind."""
        found, seen = [], set()
        for number, table in enumerate(self._tables):
            rows = {row: index for index, (of, row) in enumerate(self._rows) if of == number}
            columns = [name for name in ("data_source", "reward_model", "extra_info") if name in table.column_names]
            for row, values in enumerate(table.select(columns).to_pylist()):
                kind = (values["data_source"], _shape(values))
                if row in rows and kind not in seen:
                    seen.add(kind)
                    found.append((self._place((number, row)), rows[row]))
        return found

    def check_ids(self, num_embeddings: int) -> None:
        """Raise `DataError` for the first prompt with a token that a model of so many embeddings does not have."""
        for row, ids in zip(self._rows, self._ids, strict=True):
            if (largest := int(ids.max(initial=0))) >= num_embeddings:
                raise DataError(
                    f"{self._place(row)}, column {self._prompt_key!r}: the prompt has token {largest}, but the model "
                    f"has embeddings for 0 to {num_embeddings - 1}; use the model's own tokenizer, or enlarge the "
                    "model's embedding (resize_token_embeddings) and save it"
                )

    @functools.cached_property
    def ids_digest(self) -> str:
        """SHA-256 of the token ids of all prompts, in file order."""
        hashed = hashlib.sha256()
        for ids in self._ids:
            hashed.update(len(ids).to_bytes(4, "little") + ids.astype("<i4").tobytes())
        return hashed.hexdigest()

    def state_dict(self, again: Sequence[Prompt] = ()) -> dict[str, Any]:
        """The position of `next`, what the curriculum knows, and which prompts and seed it applies to. After a resume
        from this state, `next` first returns the prompts `again`."""
        indices = [prompt.index for prompt in again] + self._again
        place: dict[str, Any] = {"epoch": self._epoch, "position": self._position, "again": indices}
        if self._curriculum is not None:
            place |= {"num_skipped": self._num_skipped, "num_equal": self._num_equal.tobytes().hex()}
        return place | {"seed": self._seed, "num_prompts": len(self), "digest": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; one that was saved without a curriculum knows no group yet. Raises `DataError` as
        `check_state` does.
        """
        self.check_state(state)
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)
        self._again = list(state.get("again", []))
        known = bytearray.fromhex(state["num_equal"]) if "num_equal" in state else bytearray(len(self))
        self._num_equal = np.frombuffer(known, dtype=np.uint8)
        self._num_skipped, self._draws = state.get("num_skipped", 0), []

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `DataError` if `state` belongs to other prompts or another seed. An early one has no digest."""
        found = {"seed": self._seed, "num_prompts": len(self), "digest": self.digest}
        names = {"seed": "the seed", "num_prompts": "the number of prompts", "digest": "the digest of the prompts"}
        for name, value in found.items():
            if state.get(name, value) != value:
                raise DataError(
                    f"cannot resume with the prompts of {', '.join(map(str, self._paths))}: {names[name]} was "
                    f"{state[name]} and is {value}. Give the run the files, data settings and seed that it had, or "
                    "start another with trainer.resume_mode=disable and another trainer.default_local_dir (from the "
                    "weights of this one, if you want: actor_rollout_ref.model.path=ITS_FOLDER/actor/global_step_N)"
                )

    def _advance(self) -> int:
        if self._again:
            return self._again.pop(0)
        while True:
            # Each epoch has its own order.
            if self._position == len(self):
                self._epoch, self._position, self._num_skipped = self._epoch + 1, 0, 0
                self._order = self._order_of(self._epoch)
            self._position += 1
            index = self._order[self._position - 1]
            # The curriculum passes over some prompts. It cannot pass over a whole epoch: the last ones are all drawn.
            if self._curriculum is None:
                return index
            self._draws.append(self._is_drawn(index, self._curriculum))
            if self._draws[-1]:
                return index
            self._num_skipped += 1

    def _is_drawn(self, index: int, curriculum: Curriculum) -> bool:
        """Whether this epoch draws the prompt."""
        probability = curriculum.probability(int(self._num_equal[index]))
        if probability == 1 or len(self) - self._num_skipped <= curriculum.min_prompts:
            return True
        return random.Random(f"{self._seed}/{self._epoch}/{index}").random() < probability

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _subset(self, num_rows: int | None, total: int) -> list[tuple[int, int]]:
        """The prompts to use, all or a seeded sample of them, as (table, row) pairs in file order."""
        rows = [(table, row) for table in range(len(self._tables)) for row in range(self._tables[table].num_rows)]
        if num_rows is None:
            return rows
        if not 0 < num_rows <= total:
            names = ", ".join(map(str, self._paths))
            raise DataError(f"{num_rows} rows are requested, but {names} has {total}; give a number from 1 to {total}")
        return sorted(random.Random(self._seed).sample(rows, num_rows))

    def _encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encoder: MessageEncoder,
        prompt_ids: Callable[[Messages], tuple[int, ...] | None] | None,
    ) -> list[np.ndarray]:
        """The ids of each prompt, as int32 arrays: Python lists of a large training set would take gigabytes."""
        encoded: list[np.ndarray] = []
        hashed = hashlib.sha256()
        as_text: dict[int, list[tuple[tuple[int, int], str]]] = {}  # by file: rows with a token that is text here
        for start in range(0, len(self._rows), _ENCODE_ROWS):
            rows = self._rows[start : start + _ENCODE_ROWS]
            chats = [self._tables[table].column(self._prompt_key)[row].as_py() for table, row in rows]
            # What the environment does not write itself is tokenized in one call.
            own: list[tuple[int, ...] | None] = []
            texts: list[str] = []
            for row, chat in zip(rows, chats, strict=True):
                with self._naming(row):
                    own.append(None if prompt_ids is None else prompt_ids(chat))
                    if own[-1] is None:
                        texts.append(encoder.text(chat))
                hashed.update(json.dumps([[message["role"], message["content"]] for message in chat]).encode())
            of_texts = zip(texts, _encode_texts(tokenizer, texts) if texts else [], strict=True)
            for row, chat, written in zip(rows, chats, own, strict=True):
                if written is not None:
                    encoded.append(np.asarray(written, dtype=np.int32))
                    continue
                text, ids = next(of_texts)
                with self._naming(row):
                    checked = encoder.checked(chat, text, ids)
                if checked != ids:
                    as_text.setdefault(row[0], []).append((row, encoder.found(ids, checked)))
                encoded.append(np.asarray(checked, dtype=np.int32))
        self.digest = hashed.hexdigest()
        for row, array in zip(self._rows, encoded, strict=True):
            if not len(array):
                raise DataError(
                    f"{self._place(row)}, column {self._prompt_key!r}: the tokenizer makes no token of the prompt; are "
                    "all of its files there, and does its chat template write the messages?"
                )
        for found in as_text.values():
            self._warn_of_tokens(found)
        return encoded

    @contextlib.contextmanager
    def _naming(self, row: tuple[int, int]) -> Iterator[None]:
        """Context in which a `DataError` names the row."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self._place(row)}, column {self._prompt_key!r}: {error}") from error

    def _warn_of_tokens(self, found: list[tuple[tuple[int, int], str]]) -> None:
        row, token = found[0]
        log.warning(
            "%s: %d of its prompts have the text of a control token in them (first: row %d, %r). It is encoded by its "
            "characters, so that it does not act; only the chat template writes control tokens, and only tags of the "
            "environment are tokens in a text",
            self._paths[row[0]], len(found), row[1], token,
        )  # fmt: skip

    def _check_lengths(self, max_start_length: int, filter_overlong: bool) -> None:
        kept = [index for index, ids in enumerate(self._ids) if len(ids) <= max_start_length]
        if len(kept) == len(self._ids):
            return
        if not filter_overlong:
            row, ids = next(pair for pair in zip(self._rows, self._ids, strict=True) if len(pair[1]) > max_start_length)
            raise DataError(
                f"{self._place(row)}, column {self._prompt_key!r}: the prompt has {len(ids)} tokens, but "
                f"data.max_start_length is {max_start_length}; raise it, or drop such rows with "
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
        return Prompt(tuple(self._ids[index].tolist()), values["data_source"], values, index, values[self._prompt_key])

    def _place(self, row: tuple[int, int]) -> str:
        return f"{self._paths[row[0]]}: row {row[1]}"


def _shape(value: Any) -> Any:
    """What two values have in common if they have the same fields and types, and the same ones are null or empty."""
    if isinstance(value, Mapping):
        return tuple((name, _shape(part)) for name, part in value.items())
    if isinstance(value, list):
        return ("list", frozenset(map(_shape, value)))
    if isinstance(value, str):
        return "text" if value.strip() else "empty"
    if isinstance(value, float) and value != value:
        return "NaN"
    return type(value).__name__
