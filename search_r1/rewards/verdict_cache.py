"""Verdicts in a SQLite file, so that a judge sees each answer once, however often it occurs in one or several runs."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from search_r1.errors import OnlineError
from search_r1.http.response_cache import ResponseCache, request_key
from search_r1.rewards.verdict import read_score
from verl.errors import ConfigError

log = logging.getLogger(__name__)

_NO_MATTER = ("max_tokens",)  # a verdict that was not cut is the same under another limit


class VerdictCache:
    """Replies keyed by the exact request: model, sampling, rubric, question, targets and answer.

    Only replies with a valid score are stored, and they never expire. Several processes may share the file. If the file
    fails during a run, a warning is logged and the run continues without it.
    """

    def __init__(self, path: str) -> None:
        """Raises `ConfigError` for a file that cannot be used."""
        try:
            self._file = ResponseCache(str(Path(path).expanduser()), math.inf, math.inf)
        except OnlineError as error:
            raise ConfigError(f"judge: {error}") from error

    def get(self, body: dict[str, Any]) -> float | None:
        """The score of the stored reply, or None."""
        try:
            reply = self._file.get(_key(body))
            return None if reply is None else read_score(reply)
        except (OnlineError, ValueError) as error:
            log.warning("a stored verdict cannot be read: %s", error)
            return None

    def put(self, body: dict[str, Any], reply: str) -> None:
        """Store a reply that `read_score` accepts."""
        try:
            self._file.put(_key(body), reply, is_empty=False)
        except OnlineError as error:
            log.warning("a verdict could not be stored: %s", error)


def _key(body: dict[str, Any]) -> Any:
    return request_key("judge", {key: value for key, value in body.items() if key not in _NO_MATTER})
