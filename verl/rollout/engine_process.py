"""The main module of a process of vLLM. Run, it imports this package, with its settings for libraries, before vLLM.

Such a process ends without the interpreter's clearing away of modules, which takes longer than an engine is given to
end (`SHUTDOWN_S`): what it has to release, vLLM and Python's exit functions have released before.
"""

from __future__ import annotations

import atexit
import os

if __name__ == "__mp_main__":
    atexit.register(os._exit, 0)  # registered first, it runs last; whoever started it asks only whether it lives
