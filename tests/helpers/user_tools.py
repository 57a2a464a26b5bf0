"""A tool as a user writes one."""

from __future__ import annotations


async def shout(word: str) -> str:
    """Say a word loudly.

    Args:
        word: what to say
    """
    return word.upper()
