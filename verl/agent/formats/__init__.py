"""Formats in which chat models write tool calls: `format_of` finds the one of a tokenizer's chat template."""

from verl.agent.formats.choosing import format_of
from verl.agent.formats.interface import Call, CallStatus, Format, Message, ParsedTurn, Rendered, Tool

__all__ = ["Call", "CallStatus", "Format", "Message", "ParsedTurn", "Rendered", "Tool", "format_of"]
