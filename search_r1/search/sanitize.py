"""Keep retrieved text from speaking the agent's grammar.

A passage with `<answer>Paris</answer>` in it would otherwise be read as the policy's own answer.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"<\s*/?\s*(?:answer|search|information|think|result)\s*/?\s*>", re.IGNORECASE)


def strip_agent_tags(text: str) -> str:
    """`text` without the agent's tags; repeated, because removing one tag can join the halves of another."""
    while "<" in text:
        text, removed = _TAG.subn("", text)
        if not removed:
            break
    return text
