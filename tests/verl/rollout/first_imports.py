"""What a process has done before it imports this module."""

from __future__ import annotations

import gc
import sys
from multiprocessing.connection import Connection

LOOKS_RARELY = gc.get_threshold()[0] > 1000


def tell(to: Connection) -> None:
    main = sys.modules["__main__"].__spec__
    to.send((main.name if main else None, LOOKS_RARELY))
