"""What a Ray that this project starts is told."""

from __future__ import annotations

import os
from typing import Any


def test_workers_have_the_priority_of_the_process_that_started_them(ray_session: Any) -> None:
    @ray_session.remote
    def niceness() -> int:
        return os.nice(0)

    assert ray_session.get(niceness.remote()) == os.nice(0)
