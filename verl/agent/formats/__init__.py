"""Formats in which chat models write tool calls: `format_of` finds the one of a tokenizer's chat template.

`write_conversation` writes a whole conversation in it, `read_conversation` reads one back from the ids of its turns.
"""

from verl.agent.formats.choosing import format_of
from verl.agent.formats.conversation import Part, read_conversation, read_turn, write_conversation
from verl.agent.formats.interface import Call, CallStatus, Format, Message, ParsedTurn, Rendered, Tool

__all__ = [
    "Call",
    "CallStatus",
    "Format",
    "Message",
    "ParsedTurn",
    "Part",
    "Rendered",
    "Tool",
    "format_of",
    "read_conversation",
    "read_turn",
    "write_conversation",
]
