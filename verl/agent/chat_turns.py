"""Replies in a chat: what an environment says after a turn that the policy itself brought to an end.

A turn that ends at a stop string is unfinished: the reply is put into it, and the policy goes on. After EOS the turn is
over. In a chat the reply then is a message of the user, with the headers of the tokenizer's chat template, and the
assistant is given the word again; without a template a text has no headers, and the reply simply follows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from verl.agent.text import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_ANSWER, _REPLY = "what-the-assistant-said", "what-the-user-replied"


@dataclass(frozen=True)
class UserMessage:
    """The ids around a user's message that follows a turn of the assistant: `head` ends that turn and opens the
    message, `tail` closes it and opens the assistant's next turn."""

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
        """Without what the policy has sampled of it: the token that ends a turn."""
        return self.head[self.head.index(turn[-1]) + 1 :] if turn and turn[-1] in self.head else self.head


def user_message(tokenizer: PreTrainedTokenizerBase) -> UserMessage | None:
    """By the tokenizer's chat template. None without one, or when it has no place for a second message of the user."""
    return None if tokenizer.chat_template is None else _user_message(tokenizer, str(tokenizer.chat_template))


@lru_cache(maxsize=8)
def _user_message(tokenizer: PreTrainedTokenizerBase, template: str) -> UserMessage | None:
    chat = [("user", "?"), ("assistant", _ANSWER), ("user", _REPLY)]
    messages = [{"role": role, "content": content} for role, content in chat]
    try:
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except TemplateError as error:
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
    tokenizer: PreTrainedTokenizerBase, turn: Sequence[int], reply: str, turn_is_over: bool
) -> tuple[int, ...]:
    """The ids of a reply to the policy's `turn`."""
    message = user_message(tokenizer) if turn_is_over else None
    return (
        encode_text(tokenizer, reply) if message is None else message.wrap(turn, encode_text(tokenizer, reply.strip()))
    )


def unwrapped(tokenizer: PreTrainedTokenizerBase, turn: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """The reply alone, of what `reply_ids` gave."""
    message = user_message(tokenizer)
    return ids if message is None else message.unwrap(turn, ids)
