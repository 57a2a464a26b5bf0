"""Between token ids and text: ids are sampled and trained on, text serves only to find tags and to be read; and the
longest start of a text that fits into so many tokens.

Text from outside (passages, replies of an environment, questions of users) must not act: `encode_outside` encodes it so
that none of it is an added token, such as the ones that end a turn, and that its characters are all there.

`reply_ids` writes an environment's reply after a turn. A turn that ends at a stop string is unfinished: the reply is
appended to it, and the policy continues the same turn. After EOS the turn is over: in a chat, the reply is then a user
message with the headers of the tokenizer's chat template, and a new assistant turn is opened. Without a template there
are no headers, and the reply simply follows.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from verl.errors import DataError
from verl.protocol import Source, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"  # how bytes are decoded that are no character, or none yet


@lru_cache(maxsize=256)  # a reply is measured, then encoded, and trajectories of one question look the same things up
def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of `text` alone: no BOS, no EOS; half a surrogate pair, which is no character, is read as U+FFFD."""
    return tuple(tokenizer(whole_characters(text), add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=256)
def encode_outside(tokenizer: PreTrainedTokenizerBase, text: str, tags: tuple[str, ...] = ()) -> tuple[int, ...]:
    """The ids of a text from outside: as `encode_text`, but none is that of an added token, special or not.

    What looks like one is encoded by its characters. `tags` are those texts that may be added tokens nevertheless: the
    environment writes them itself.
    """
    ids = encode_text(tokenizer, text)
    literals = added_tokens(tokenizer)
    if all(literals.get(token) in (None, *tags) for token in ids):
        return ids
    allowed = "|".join(map(re.escape, sorted(set(tags) & set(literals.values()), key=len, reverse=True)))
    pieces = re.split(f"({allowed})", whole_characters(text)) if allowed else [whole_characters(text)]
    return tuple(
        token
        for place, piece in enumerate(pieces)
        for token in (encode_text(tokenizer, piece) if place % 2 else _encode_characters(tokenizer, piece))
    )


_SPARE = 8  # tokens that a cut in a text may add to it
_PIECE = 1 << 14  # characters that are encoded at once


async def exceeds(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> bool:
    """Whether `text` is sure to have more than `most` tokens. It is encoded piece by piece, between which other tasks
    run, and only as far as it takes to know: a text of megabytes would take half a minute.
    """
    if len(text) <= _PIECE:
        return False
    number = 0
    for start in range(0, len(text), _PIECE):
        piece = whole_characters(text[start : start + _PIECE])
        number += len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]) - _SPARE
        if number > most:
            return True
        await asyncio.sleep(0)
    return False


def _encode_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of `text` by the model of the tokenizer alone, which does not know of added tokens."""
    literals = added_tokens(tokenizer)
    encode = _model_alone(tokenizer)
    ids = encode(text)
    found = {literals[token] for token in ids if token in literals}
    if not found:
        return ids
    # the vocabulary of the model has them too: cut behind the first character, so that none is whole
    cuts = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, found)), text)]
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    ids = [token for piece in pieces for token in encode(piece)]
    if any(token in literals for token in ids):  # the normalizer makes one of other characters
        ids = [token for character in text for token in encode(character) if token not in literals]
    return ids


@lru_cache(maxsize=8)
def added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Text by id of all added tokens but those that are ordinary text: white space, and what stands for the unknown,
    unless that also begins or ends a text, as GPT-2's does."""
    added = {token: str(literal) for token, literal in tokenizer.added_tokens_decoder.items()}
    plain = {tokenizer.unk_token_id} - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    return {token: text for token, text in added.items() if text.strip() and token not in plain}


@lru_cache(maxsize=8)
def _model_alone(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Encodes as `tokenizer` would without added tokens."""
    if not tokenizer.is_fast:
        return lambda text: list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    from tokenizers import Tokenizer

    parts = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    alone = Tokenizer(parts.model)  # shares the vocabulary
    if parts.normalizer is not None:
        alone.normalizer = parts.normalizer
    if parts.pre_tokenizer is not None:
        alone.pre_tokenizer = parts.pre_tokenizer
    return lambda text: list(alone.encode(text, add_special_tokens=False).ids)


def whole_characters(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair, which can be neither tokenized nor stored."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def decode_turn(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a policy turn, without EOS and padding tokens.

    Other special tokens stay: a tokenizer may hold the tags of a grammar as special tokens, and skipping them would
    hide the policy's actions.
    """
    return decode_ids(tokenizer, _without_silent(tokenizer, ids))


class TurnDecoder:
    """Incremental `decode_turn`, for a turn that is still being sampled.

    The texts put together are exactly the text of the turn, and none ends inside a character that spans several tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Tokens from `_start` on are decoded again, since a token's text may depend on the one before it; the text of
        # those up to `_read` was given out.
        self._start = self._read = 0
        self._given = 0  # characters

    def feed(self, ids: Sequence[int]) -> str:
        """The text that the next `ids` complete; "" while a character is incomplete."""
        self._ids += _without_silent(self._tokenizer, ids)
        before = decode_ids(self._tokenizer, self._ids[self._start : self._read])
        text = decode_ids(self._tokenizer, self._ids[self._start :])
        if text.endswith(_REPLACEMENT) or len(text) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        self._given += len(text) - len(before)
        return text[len(before) :]

    def end(self) -> str:
        """The rest of the turn: bytes that never completed a character, as the tokenizer decodes them."""
        return decode_ids(self._tokenizer, self._ids)[self._given :]


def check_decoding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> None:
    """Raises `DataError` if `ids`, special tokens kept, do not decode to `text`: they are another tokenizer's."""
    decoded = str(tokenizer.decode(list(ids)))
    if decoded != text:
        start = len(commonprefix([decoded, text]))
        here, there = decoded[start : start + 40], text[start : start + 40]
        raise DataError(
            f"the tokenizer is not the one that wrote these ids: at character {start} they decode to {here!r}, "
            f"not {there!r}"
        )


def policy_texts(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """One text for each policy turn; the prompt and the environment's replies are never included."""
    return [decode_turn(tokenizer, segment.ids) for segment in trajectory.segments if segment.source is Source.POLICY]


def _without_silent(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    silent = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    return [token for token in ids if token not in silent]


def decode_ids(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of `ids` as they are, special tokens kept."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a chat template raises for messages that it cannot write: what it says itself, and what its Python raises."""

_ANSWER, _REPLY = "what-the-assistant-said", "what-the-user-replied"


@dataclass(frozen=True)
class UserMessage:
    """The ids around a user message that follows an assistant turn: `head` ends that turn and opens the message, `tail`
    closes it and opens the assistant's next turn."""

    head: tuple[int, ...]
    tail: tuple[int, ...]

    def wrap(self, turn: Sequence[int], reply: Sequence[int]) -> tuple[int, ...]:
        """`reply` as a message after the assistant's `turn`."""
        return (*self._head_after(turn), *reply, *self.tail)

    def unwrap(self, turn: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
        """The reply in `ids`, whether or not it was wrapped."""
        head = self._head_after(turn)
        wrapped = tuple(ids[: len(head)]) == head and tuple(ids[-len(self.tail) :]) == self.tail
        return ids[len(head) : -len(self.tail)] if wrapped else ids

    def _head_after(self, turn: Sequence[int]) -> tuple[int, ...]:
        """`head` after `turn`: without the token that ends a turn, if the policy has sampled it already."""
        return self.head[self.head.index(turn[-1]) + 1 :] if turn and turn[-1] in self.head else self.head


def user_message(tokenizer: PreTrainedTokenizerBase) -> UserMessage | None:
    """The `UserMessage` of the chat template. None if there is none, or it does not accept a second user message."""
    return None if tokenizer.chat_template is None else _user_message(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _user_message(tokenizer: PreTrainedTokenizerBase, template: str) -> UserMessage | None:
    # The template writes a chat with known texts, between which its own parts are found.
    chat = [("user", "?"), ("assistant", _ANSWER), ("user", _REPLY)]
    messages = [{"role": role, "content": content} for role, content in chat]
    try:
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except TEMPLATE_ERRORS as error:
        log.warning(
            "the chat template refuses a second user message (%s): replies are appended after EOS without a template",
            error,
        )
        return None
    head, reply, tail = text.partition(_ANSWER)[2].partition(_REPLY)
    if not (head and reply and tail):
        log.warning("the chat template drops a second user message: replies are appended after EOS without a template")
        return None
    return UserMessage(encode_text(tokenizer, head), encode_text(tokenizer, tail))


def reply_ids(
    tokenizer: PreTrainedTokenizerBase, turn: Sequence[int], reply: str, turn_is_over: bool, tags: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """The ids of a reply to the policy's `turn`. Of added tokens, only the environment's own `tags` come out of it."""
    message = user_message(tokenizer) if turn_is_over else None
    if message is None:
        return encode_outside(tokenizer, reply, tags)
    return message.wrap(turn, encode_outside(tokenizer, reply.strip(), tags))


def unwrapped(tokenizer: PreTrainedTokenizerBase, turn: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """The reply itself, from the ids that `reply_ids` returned."""
    message = user_message(tokenizer)
    return ids if message is None else message.unwrap(turn, ids)


_CUTS = re.compile(r"(?<!\S)\S{1,30}(?!\S)|\S")  # a text may be cut behind each match
_FIRST_LENGTH = 4096  # characters; three passages of a hundred words are some 2,000


def cut_text(tokenizer: PreTrainedTokenizerBase, text: str, most: int | None) -> str:
    """`text`, or its beginning and a note that it was cut, in at most `most` tokens (None: no limit)."""
    if most is None:
        return text

    def fits(part: str) -> bool:
        return len(encode_outside(tokenizer, part)) <= most

    # If only white space at the end is too much, nothing was lost that a note has to tell.
    whole = longest_start(text, fits)
    if whole == text.rstrip():
        return text if fits(text) else whole
    # The note takes room, too; where nothing fits beside it, the text goes without it.
    note = f"\n[cut: {len(text)} characters in all]"
    shown = longest_start(text, lambda part: fits(part + note))
    return shown + note if shown else whole


def fits_in(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> bool:
    """Whether `text` has at most `most` tokens."""
    # Tokens have some characters each: what is much longer need not be encoded to know.
    return len(text) <= 100 * most and len(encode_outside(tokenizer, text)) <= most


def longest_start(text: str, fits: Callable[[str], bool]) -> str:
    """The longest prefix of `text` that fits, without trailing white space; "" if nothing fits.

    It ends at the end of a word; words of more than 30 characters, as in a script without spaces, may be cut anywhere.
    Found by doubling, then bisection: `fits` is called about 10 times, never with much more text than fits.
    """
    # Double the length until it does not fit.
    size = _FIRST_LENGTH
    while size < len(text) and fits(text[:size]):
        size *= 2
    if size >= len(text) and fits(text):
        return text.rstrip()
    # The limit is within `size`: find the last word that fits.
    ends = [0, *(match.end() for match in _CUTS.finditer(text[:size]))]
    low, high = 0, len(ends) - 1  # text[:ends[low]] fits or is empty
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(text[: ends[middle]]) else (low, middle - 1)
    return text[: ends[low]]
