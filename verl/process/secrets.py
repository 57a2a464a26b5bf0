"""Masking of secrets before a configuration or a message is written or sent anywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from url_text import MASK, without_credentials

_NAMES = (
    r"(api[_-]?keys?|access[_-]?keys?|private[_-]?keys?|tokens?|passwords?|passwd|secrets?|credentials?|authorization)"
)
SECRET_KEY = re.compile(rf"(^|[_-]){_NAMES}$", re.IGNORECASE)
URL_PARAMETER = re.compile(rf"([?&]([^=&\s]*[_-])?{_NAMES}=)[^&\s#]+", re.IGNORECASE)
BEARER = re.compile(r"\b(bearer\s+)[^\s,;'\"]{8,}", re.IGNORECASE)
_SHORTEST_SECRET = 8  # of a variable: a shorter value may be an ordinary word


def mask_secrets(value: Any) -> Any:
    """A copy of a tree of dicts and lists in which secrets are `***`.

    A secret is any text under a key that ends in api_key, token, password, secret, credentials or the like, and what
    `mask_text` finds. Numbers stay: `max_tokens: 500` is not a secret.
    """
    if isinstance(value, Mapping):
        return {
            key: _mask_all(item) if SECRET_KEY.search(str(key)) else mask_secrets(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value


def mask_text(text: str) -> str:
    """`text` with `***` for user and password in URLs, their secret parameters, bearer tokens, and the values of
    environment variables whose names suggest a secret, such as HF_TOKEN or SERPER_API_KEY."""
    secrets = {value.strip() for name, value in os.environ.items() if SECRET_KEY.search(name)}
    for secret in sorted(secrets, key=len, reverse=True):  # the longest first: one may be part of another
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, MASK)
    text = URL_PARAMETER.sub(rf"\g<1>{MASK}", without_credentials(text))
    return BEARER.sub(rf"\g<1>{MASK}", text)


def _mask_all(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mask_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_all(item) for item in value]
    return MASK if isinstance(value, str) and value else value
