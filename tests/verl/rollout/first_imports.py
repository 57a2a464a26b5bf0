"""What a process has done before it imports this module, and what it still does at its end."""

from __future__ import annotations

import atexit
import gc
import sys
from multiprocessing.connection import Connection

LOOKS_RARELY = gc.get_threshold()[0] > 1000


class ClearedAway:
    def __init__(self, to: Connection) -> None:
        self.to = to

    def __del__(self) -> None:
        self.to.send("modules were cleared away")


def tell(to: Connection) -> None:
    main = sys.modules["__main__"].__spec__
    to.send((main.name if main else None, LOOKS_RARELY))
    atexit.register(to.send, "exit functions were called")
    globals()["kept"] = ClearedAway(to)
