"""From the messages of a prompt to its token ids, with the tokenizer's chat template.

Text from outside cannot act here either: `encode_messages` is for messages whose contents others wrote, such as the
rows of a prompt file; `encode_prompt` is for messages of our own, with texts from outside in some places. The whole
text is encoded at once, as the model saw such prompts. Only if this gives a control token that the template did not
write, the prompt is encoded in pieces: the template's own, and those from outside, which yield no added token.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from verl.agent.text import TEMPLATE_ERRORS, added_tokens, encode_outside, encode_text
from verl.errors import DataError, translated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, str]]
ROLES = ("system", "user", "assistant", "tool")
"""Those of the OpenAI chat schema. A chat template leaves out a message of another one, or writes it as it likes."""
WITHOUT_SYSTEM = (
    "leave `system` out of the header of agent.template, put its text at the beginning of the template's own, and make "
    "the prompt files again with that template"
)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    outside: Mapping[str, str] | None = None,
    *,
    tags: tuple[str, ...] = (),
) -> list[int]:
    """The token ids that an episode starts from, for messages that are our own.

    Applies the tokenizer's chat template (with the generation prompt) if it has one; else encodes the text of the
    single message as it is. No BOS or EOS beyond what the template writes. An empty system message is left out. Raises
    `DataError` for a prompt without content, for an unknown role, for messages that the chat template refuses, and for
    several messages without a chat template.

    `outside`: texts from outside, such as a user's question, by the placeholders that stand for them in the messages.
    Of added tokens, only `tags` can come out of them (see `verl.agent.text`); the messages themselves are trusted.
    """
    text = _written(tokenizer, checked_chat(messages))
    if not outside:
        return list(encode_text(tokenizer, text))
    pieces = re.split(f"({'|'.join(map(re.escape, outside))})", text)
    pieces[1::2] = [outside[piece] for piece in pieces[1::2]]
    whole = encode_text(tokenizer, "".join(pieces))
    own = [token for piece in pieces[::2] for token in _control(tokenizer, encode_text(tokenizer, piece), tags)]
    if _control(tokenizer, whole, tags) == own and not any(map(_names_tokens(tokenizer, tags), pieces[1::2])):
        return list(whole)
    return _encode_pieces(tokenizer, pieces, tags)


def encode_messages(tokenizer: PreTrainedTokenizerBase, messages: Messages, tags: tuple[str, ...] = ()) -> list[int]:
    """The token ids that an episode starts from, for messages whose contents are text from outside.

    As `encode_prompt`, but of added tokens, only `tags` can come out of the contents. The template's own stay.
    """
    encoder = MessageEncoder(tokenizer, tags)
    text = encoder.text(messages)
    return encoder.checked(messages, text, encode_text(tokenizer, text))


class MessageEncoder:
    """`encode_messages` in two parts, between which many texts can be tokenized in one call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tags: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._tags = tokenizer, tags
        self._names_tokens = _names_tokens(tokenizer, tags)
        self._own: dict[str, list[int]] = {}  # the template's control tokens, by what the messages have in common

    def text(self, messages: Messages) -> str:
        """What the chat template writes for `messages`. Raises `DataError` as `encode_messages` does."""
        return _written(self._tokenizer, checked_chat(messages))

    def checked(self, messages: Messages, text: str, ids: Sequence[int]) -> list[int]:
        """`ids`, those of the whole `text`, or others if a text from outside would have given a control token."""
        chat = checked_chat(messages)
        contents = _contents(chat)
        passes = _control(self._tokenizer, ids, self._tags) == self._own_control(chat, contents)
        if passes and not any(map(self._names_tokens, contents)):
            return list(ids)
        pieces = self._pieces(chat, contents, text)
        if passes and not any(map(self._names_tokens, pieces[1::2])):  # the template left it out
            return list(ids)
        return _encode_pieces(self._tokenizer, pieces, self._tags)

    def found(self, ids: Sequence[int], checked: Sequence[int]) -> str:
        """The text of the first added token of `ids` that `checked` does not have, where the two differ."""
        kept = _control(self._tokenizer, checked, self._tags)
        for token in _control(self._tokenizer, ids, self._tags):
            if token not in kept:
                return added_tokens(self._tokenizer)[token]
            kept.remove(token)
        return ""

    def _own_control(self, chat: list[dict[str, Any]], contents: list[str]) -> list[int]:
        """The control tokens that the template writes around the contents, whatever these are."""
        if self._tokenizer.chat_template is None:
            return []
        marked = _with_texts(chat, _marks(1, len(contents)))
        kind = repr(marked)
        if kind not in self._own:
            ids = encode_text(self._tokenizer, _written(self._tokenizer, marked))
            self._own[kind] = _control(self._tokenizer, ids, self._tags)
        return self._own[kind]

    def _pieces(self, chat: list[dict[str, Any]], contents: list[str], text: str) -> list[str]:
        """`text` in pieces: the template's own at even places, at odd ones those from outside.

        Where the template changes a content by more than its own rules for that one message, the content stands as it
        is, and the pieces are no longer `text`: the template then treats it like a text without control tokens.
        """
        if self._tokenizer.chat_template is None:
            return ["", text, ""]
        # The template's own text, from contents that say nothing; what it leaves out must not depend on them.
        marks = _marks(1, len(contents))
        pieces = self._split(chat, marks)
        if not set(marks) <= set(pieces) and pieces[::2] != self._split(chat, _marks(2, len(contents)))[::2]:
            raise DataError(
                "the prompt has a control token of the tokenizer in it, and the chat template changes its text so that "
                "the two cannot be told apart; take the token out of the prompt"
            )
        # The contents as the template writes them: unchanged, changed (stripped, say), or nobody knows.
        as_it_is = dict(zip(marks, contents, strict=True))
        changed = {mark: self._changed(chat, contents, number, text) for number, mark in enumerate(marks)}
        for by_mark in (as_it_is, changed):
            if "".join(by_mark.get(piece, piece) for piece in pieces) == text:
                return [by_mark.get(piece, piece) for piece in pieces]
        return [as_it_is.get(piece, piece) for piece in pieces]

    def _split(self, chat: list[dict[str, Any]], marks: list[str]) -> list[str]:
        written = _written(self._tokenizer, _with_texts(chat, marks))
        return re.split(f"({'|'.join(map(re.escape, marks))})", written)

    def _changed(self, chat: list[dict[str, Any]], contents: list[str], number: int, text: str) -> str:
        """What the template made of one content: what is between the parts of `text` that do not depend on it."""
        around = [*contents[:number], _marks(1, len(contents), contents)[number], *contents[number + 1 :]]
        with contextlib.suppress(DataError):
            parts = _written(self._tokenizer, _with_texts(chat, around)).split(around[number])
            if len(parts) == 2 and text.startswith(parts[0]) and text[len(parts[0]) :].endswith(parts[1]):
                return text[len(parts[0]) : len(text) - len(parts[1])]
        return contents[number]


def _encode_pieces(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[str], tags: tuple[str, ...]) -> list[int]:
    """Our own pieces are at even places, those from outside at odd ones."""
    own = [encode_text(tokenizer, piece) for piece in pieces[::2]]
    outside = [encode_outside(tokenizer, piece, tags) for piece in pieces[1::2]]
    return [token for pair in zip_longest(own, outside, fillvalue=()) for ids in pair for token in ids]


def _control(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], tags: tuple[str, ...]) -> list[int]:
    """The added tokens among `ids`, but for `tags`."""
    added = added_tokens(tokenizer)
    return [token for token in ids if token in added and added[token] not in tags]


@lru_cache(maxsize=8)
def _names_tokens(tokenizer: PreTrainedTokenizerBase, tags: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a text has that of an added token in it, as it is, or for tokens that are found so, as normalized."""
    literals = set(added_tokens(tokenizer).values()) - set(tags)
    if not literals:
        return lambda text: False
    find = re.compile("|".join(map(re.escape, sorted(literals)))).search
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None  # type: ignore[attr-defined]
    if normalizer is None or not any(token.normalized for token in tokenizer.added_tokens_decoder.values()):
        return lambda text: find(text) is not None
    normalize = normalizer.normalize_str
    find_normalized = re.compile("|".join(map(re.escape, sorted(map(normalize, literals))))).search
    return lambda text: find(text) is not None or find_normalized(normalize(text)) is not None


def checked_chat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a prompt, without empty system messages, which say nothing and many chat templates refuse.

    Raises `DataError` if there are none, another has no content, or one has a role that is none of `ROLES`.
    """
    if not messages or any(message is None for message in messages):
        raise DataError("the prompt is empty")
    for place, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise DataError(f"messages[{place}] has the role {message['role']!r:.100}; use one of {', '.join(ROLES)}")
    chat = [dict(message) for message in messages if message["content"] or message["role"] != "system"]
    if not chat or not all(message["content"] for message in chat):
        raise DataError("the prompt is empty, or has a message without content")
    return chat


def _written(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]]) -> str:
    if tokenizer.chat_template is not None:
        with translated(TEMPLATE_ERRORS, lambda error: DataError(_refusal(tokenizer, chat, error))):
            return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    if len(chat) != 1:
        advice = WITHOUT_SYSTEM if chat[0]["role"] == "system" else "use the tokenizer of an instruction-tuned model"
        raise DataError(
            f"{len(chat)} messages in a prompt need a tokenizer with a chat template; this one has none; {advice}"
        )
    return str(chat[0]["content"])


def _refusal(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], error: Exception) -> str:
    """Why the chat template does not write `chat`, and what to set if it is for the system message."""
    reason = f"the chat template of the tokenizer cannot write this prompt: {type(error).__name__}: {error}"
    others = [message for message in chat if message["role"] != "system"]
    if others and len(others) < len(chat):
        with contextlib.suppress(*TEMPLATE_ERRORS):
            tokenizer.apply_chat_template(others, add_generation_prompt=True, tokenize=False)
            return f"{reason}. It takes no system message: {WITHOUT_SYSTEM}"
    return reason


# The texts of messages: all but the roles, also in further fields, such as the arguments of a tool call.


def _contents(chat: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    _replaced(chat, keep)
    return found


def _replaced(chat: list[dict[str, Any]], new: Callable[[str], str]) -> list[dict[str, Any]]:
    """`chat` with `new(text)` for each of its texts, called in their order."""

    def replace(value: Any) -> Any:
        if isinstance(value, str):
            return new(value)
        if isinstance(value, Mapping):
            return {name: replace(part) for name, part in value.items()}
        return [replace(part) for part in value] if isinstance(value, Sequence) else value

    return [{name: part if name == "role" else replace(part) for name, part in message.items()} for message in chat]


def _with_texts(chat: list[dict[str, Any]], texts: Sequence[str]) -> list[dict[str, Any]]:
    """`chat` with other texts, in the order of `_contents`."""
    following = iter(texts)
    return _replaced(chat, lambda _: next(following))


def _marks(kind: int, count: int, others: Sequence[str] = ()) -> list[str]:
    """Texts that stand for contents, in none of `others`: no template strips, folds or escapes a part of them."""
    length = 12
    while any(f"~{kind}{'0' * length}" in other for other in others):
        length += 1
    return [f"~{kind}{'0' * length}{number:06}{kind}~" for number in range(count)]
