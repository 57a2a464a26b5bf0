"""Masking of secrets before a configuration is written or sent anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from url_text import MASK, SECRET_KEY, mask_text


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


def _mask_all(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mask_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_all(item) for item in value]
    return MASK if isinstance(value, str) and value else value
