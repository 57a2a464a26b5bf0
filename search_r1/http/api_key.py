"""The API key of an online engine: read from the environment or a file, never shown or stored."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, quote_plus

from search_r1.errors import OnlineError
from text_file import read_text

_SHORTEST = 8  # a shorter text would be masked in the middle of ordinary words
_MASK = "[api key]"


class ApiKey:
    """A secret that only `reveal` shows."""

    def __init__(self, text: str, source: str) -> None:
        """Raises `OnlineError` if `text` cannot be a key; the message names `source` only."""
        text = text.strip()
        if len(text) < _SHORTEST or not text.isascii() or not text.isprintable() or " " in text:
            raise OnlineError(
                f"the API key in {source} must be one word of at least {_SHORTEST} printable ASCII characters"
            )
        self._text = text

    def __repr__(self) -> str:
        return f"ApiKey({_MASK})"

    def reveal(self) -> str:
        """The key, for the request."""
        return self._text

    def mask(self, text: str) -> str:
        """`text` with the key masked, also where it is URL-encoded."""
        for form in {self._text, quote(self._text, safe=""), quote(self._text), quote_plus(self._text)}:
            text = text.replace(form, _MASK)
        return text


def read_key(variable: str, file: str | None) -> ApiKey:
    """The key in `file`, or else in the environment variable. Raises `OnlineError` if there is none."""
    if file is not None:
        key = read_text(Path(file), lambda reason: OnlineError(f"cannot read the API key file {reason}"))
        return ApiKey(key, f"the file {file}")
    if variable not in os.environ:
        raise OnlineError(f"no API key: set {variable} in the environment, or name a file that holds the key")
    return ApiKey(os.environ[variable], f"the variable {variable}")
