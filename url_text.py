"""Addresses as messages, logs and reports may show them: without user and password.

This module imports nothing of the project, so that every room may use it.
"""

from __future__ import annotations

import re

MASK = "***"
# Up to the last @ of the host's part: a password may have an @, too. If that part has none, its ? or # is the password's.
_CREDENTIALS = re.compile(r'(?<=://)(?:[^/\s?#"]+|[^/\s@]+)(?=@)')


def without_credentials(text: str) -> str:
    """`text` with `***` for `user:password` in its URLs."""
    return _CREDENTIALS.sub(MASK, text)


def refused_address(url: str) -> str:
    """What to show of a text that is no address: its scheme, and what follows its last @. A password may be anywhere
    between the two."""
    before, _, rest = url.rpartition("@")
    scheme = re.match(r"[a-z]+://", before)
    return f"{scheme[0]}{MASK}@{rest}" if scheme else rest
