"""The environment of `openenv init` (example/openenv/setup.sh): agent.program=example.openenv.program.play

OPENENV_URL is the address of its server, ws://127.0.0.1:8010/ws by default.
"""

from __future__ import annotations

import os
from typing import Any

from search_r1.llm_agent.openenv import Form, play_openenv

FORM = Form(action=lambda text: {"message": text}, shown=lambda observation: str(observation["echoed_message"]))


async def play(task: Any) -> Any:
    """Three turns: this environment never ends by itself."""
    return await play_openenv(task, os.environ.get("OPENENV_URL", "ws://127.0.0.1:8010/ws"), FORM, max_steps=3)
