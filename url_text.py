"""Texts as messages, logs and reports may show them: addresses without user and password, and no other secrets.

This module imports nothing of the project, so that every room may use it.
"""

from __future__ import annotations

import os
import re

MASK = "***"
# Up to the last @ of the host's part: a password may have an @, too. If that part has none, its ? or # is the password's.
_CREDENTIALS = re.compile(r'(?<=://)(?:[^/\s?#"]+|[^/\s@]+)(?=@)')

_NAMES = (
    r"(api[_-]?keys?|access[_-]?keys?|private[_-]?keys?|tokens?|passwords?|passwd|secrets?|credentials?|authorization)"
)
SECRET_KEY = re.compile(rf"(^|[_-]){_NAMES}$", re.IGNORECASE)
URL_PARAMETER = re.compile(rf"([?&]([^=&\s]*[_-])?{_NAMES}=)[^&\s#]+", re.IGNORECASE)
BEARER = re.compile(r"\b(bearer\s+)[^\s,;'\"]{8,}", re.IGNORECASE)
_SHORTEST_SECRET = 8  # of a variable: a shorter value may be an ordinary word


def without_credentials(text: str) -> str:
    """`text` with `***` for `user:password` in its URLs."""
    return _CREDENTIALS.sub(MASK, text)


def refused_address(url: str) -> str:
    """What to show of a text that is no address: its scheme, and what follows its last @. A password may be anywhere
    between the two."""
    before, _, rest = url.rpartition("@")
    scheme = re.match(r"[a-z]+://", before)
    return f"{scheme[0]}{MASK}@{rest}" if scheme else rest


def mask_text(text: str) -> str:
    """`text` with `***` for user and password in URLs, their secret parameters, bearer tokens, and the values of
    environment variables whose names suggest a secret, such as HF_TOKEN or SERPER_API_KEY."""
    secrets = {value.strip() for name, value in os.environ.items() if SECRET_KEY.search(name)}
    for secret in sorted(secrets, key=len, reverse=True):  # the longest first: one may be part of another
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, MASK)
    text = URL_PARAMETER.sub(rf"\g<1>{MASK}", without_credentials(text))
    return BEARER.sub(rf"\g<1>{MASK}", text)
