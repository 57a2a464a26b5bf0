"""Turn the reply of a completions server into a sampled turn."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.agent.environment import Generation
from verl.agent.text import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOSING = re.compile(r"</([^<>/]+)>")


def generation_of(
    reply: dict[str, Any], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[Generation, bool]:
    """(turn, whether its ids are exactly the sampled ones). Raises KeyError, IndexError, TypeError or ValueError."""
    choice = reply["choices"][0]
    finish, text = choice["finish_reason"], choice["text"]
    if finish not in ("stop", "length") or not isinstance(text, str):
        raise ValueError(f"finish_reason is {finish!r}, text is a {type(text).__name__}")
    ids = choice.get("token_ids")
    if ids is not None:
        return Generation(tuple(map(int, ids)), _log_probs(choice, len(ids)), finish), True
    if finish == "stop":
        text += missing_stop(text, stop, choice)
    ids = encode_text(tokenizer, text)
    if finish == "stop" and not text.endswith(tuple(stop)) and tokenizer.eos_token_id is not None:
        ids += (tokenizer.eos_token_id,)
    return Generation(ids, (math.nan,) * len(ids), finish), False


def missing_stop(text: str, stop: Sequence[str], choice: dict[str, Any]) -> str:
    """The stop string that ended `text` and that the server removed; "" if it is there, or if the model ended the turn.

    A server's own statement is used if there is one (`stop_reason` of vLLM, `matched_stop` of SGLang). Otherwise a
    closing tag counts as removed if its opening tag is still open; of several, the one opened last.
    """
    if text.endswith(tuple(stop)):
        return ""
    for name in ("stop_reason", "matched_stop"):
        if name in choice:  # null or a token's id: the model ended the turn
            return choice[name] if choice[name] in stop else ""
    opened = {text.rfind(f"<{match[1]}>"): closing for closing in stop if (match := _CLOSING.fullmatch(closing))}
    last = max((start for start, closing in opened.items() if start >= 0 and closing not in text[start:]), default=-1)
    return opened.get(last, "") if last >= 0 else ""


def _log_probs(choice: dict[str, Any], count: int) -> tuple[float, ...]:
    """NaN for each token where the server gives none."""
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(values, list) or len(values) != count or None in values:
        return (math.nan,) * count
    return tuple(map(float, values))
