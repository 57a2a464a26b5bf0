"""A home folder that cannot be written, as in many containers: caches and Ray's token go elsewhere."""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

CACHES = {
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
}
"""Variables of the libraries that write to the home folder, and the folders that they get instead."""


def work_without_home() -> None:
    """If the home folder cannot be written, let the libraries write to a folder of this user's in the temporary folder,
    and say so. To be called before they are imported. Variables that are set stay.
    """
    home = Path(os.environ.get("HOME") or "~").expanduser()
    if home.is_dir() and os.access(home, os.W_OK | os.X_OK):
        return
    folder = Path(tempfile.gettempdir()) / f"search-r1-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # somebody else made it, to read what goes there
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    models = home / ".cache" / "huggingface"
    if models.is_dir() and not os.environ.get("XDG_CACHE_HOME"):
        os.environ.setdefault("HF_HOME", str(models))  # what was downloaded is still read there
    for name, place in CACHES.items():
        os.environ.setdefault(name, str(folder / place))
    if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # Ray would write one to the home folder
    log.warning("HOME=%s cannot be written: caches go to %s; set HOME to a folder that can be written", home, folder)
