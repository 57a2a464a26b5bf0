"""Temporary folders that are removed soon after their owner ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path

LOCK = "owner.lock"


class OwnedFolder:
    """A folder `{prefix}...` in `parent` (None: the temporary folder) that is removed with its owner.

    A killed owner leaves it behind; the next owner of such a folder removes those whose lock is free.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        for lock in parent.glob(f"{prefix}*/{LOCK}"):
            with contextlib.suppress(OSError), lock.open() as file:  # another user's, or another owner was faster
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
        hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        self._lock = (hidden / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = hidden.rename(parent / hidden.name[1:])  # others see it only now that its lock is taken

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
