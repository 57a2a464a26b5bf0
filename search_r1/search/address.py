"""How the address of a service is shown."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def without_credentials(text: str) -> str:
    """`text` with `***` for `user:password` in its URLs: what messages, logs and reports may show."""
    return _CREDENTIALS.sub("***", text)
