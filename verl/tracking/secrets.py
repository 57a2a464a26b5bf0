"""Masking of secrets before a configuration is written or sent anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
SECRET_KEY = re.compile(
    r"(^|[_-])(api_?keys?|access_?keys?|private_?keys?|tokens?|passwords?|passwd|secrets?|credentials?|authorization)$",
    re.IGNORECASE,
)
URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def mask_secrets(value: Any) -> Any:
    """A copy of a tree of dicts and lists in which secrets are `***`.

    A secret is any text under a key that ends in api_key, token, password, secret, credentials or the like, and the
    user part of a URL. Numbers stay: `max_tokens: 500` is no secret.
    """
    if isinstance(value, Mapping):
        return {
            key: _mask_all(item) if SECRET_KEY.search(str(key)) else mask_secrets(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(item) for item in value]
    return URL_CREDENTIALS.sub(MASK, value) if isinstance(value, str) else value


def _mask_all(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mask_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_all(item) for item in value]
    return MASK if isinstance(value, str) and value else value
