"""TinyWiki for a chat model that calls tools (`search_r1.data.chat_template`): conversations as warm-start rows.

A word is another token at the beginning of a text than after a space. Conversations therefore write words that are
copied with a space before them, as they are read in passages and questions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from search_r1.data.tinywiki.demonstrator import Segment
from verl.agent.formats import Message
from verl.agent.tools import load_tools
from verl.config import load_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_NAME = "tinywiki_chat"
"""The config of the runs; the tools in the prompts of the warm start are those of `agent.tools` there."""

TEMPLATE = "tinywiki_chat"
"""The prompt template, a short one."""

CALL_TAGS = ("<tool_call>", "</tool_call>")
TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)


def tool_schemas(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The tools of `CONFIG_NAME` in the form that a chat template takes."""
    config = load_config(CONFIG_NAME)
    return load_tools(config.agent.tools, config, tokenizer).schemas()


def call(name: str, **arguments: str) -> Mapping[str, Any]:
    """A tool call of a turn; the values are written with a space before them, which the tools do not read."""
    spaced = {key: f" {value}" for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "arguments": spaced}}


def says(text: str, *calls: Mapping[str, Any]) -> Message:
    """A turn of the policy: a note, and the calls that follow from it."""
    return {"role": "assistant", "content": f" {text}", "tool_calls": list(calls)}


def answers(note: str, answer: str) -> Message:
    """A turn of the policy that ends the conversation."""
    return says(f"{note} <answer> {answer} </answer>")


def segments_of(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Segment]:
    """A conversation as the segments of a warm-start row: the prompt, then turns and what the policy reads after them.

    The segments are cut where a run has them: a turn begins after the generation prompt and ends with `TURN_END`.
    """
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tools=[dict(tool) for tool in tools], tokenize=False
    )
    first, *rest = _TURN.split(str(text))
    sources = ("policy", "environment")
    # what follows the last turn is only the line break of the template
    return [("prompt", first), *((sources[place % 2], part) for place, part in enumerate(rest[:-1]))]
