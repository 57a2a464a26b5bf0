"""How an environment's reply is written into a chat, after a turn that the policy ended itself.

A turn that ends at a stop string is unfinished: the reply is appended to it, and the policy continues the same turn.
After EOS the turn is over: in a chat, the reply is then a user message with the headers of the tokenizer's chat
template, and a new assistant turn is opened. Without a template there are no headers, and the reply simply follows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from verl.agent.text import encode_outside, encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

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
