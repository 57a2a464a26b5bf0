"""How many CPU threads each process of a run computes with, unless its `num_threads` says so.

Processes that work at the same time share the cores; roles that take turns have all of them in turn.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """Cores that this process may keep busy: by its affinity, and by the quota of its container (cgroup v2 or v1).

    A quota of two and a half cores counts as two; at least 1.
    """
    limits = [len(os.sched_getaffinity(0)), *filter(None, (_quota_v2(cgroups), _quota_v1(cgroups)))]
    return max(1, int(min(limits)))


def rank_threads(ranks_at_once: int) -> int:
    """CPU threads of each of the ranks of a node that work at the same time."""
    return max(1, usable_cores() // ranks_at_once)


def engine_threads(engines_at_once: int = 1) -> int:
    """CPU threads of each engine's model: one core stays free for the processes that own the engines."""
    return max(1, (usable_cores() - 1) // engines_at_once)


def _quota_v2(cgroups: Path) -> float | None:
    """Cores by the quota of cgroup v2, in cpu.max: `QUOTA PERIOD` in microseconds, or `max PERIOD` for no quota."""
    words = _words(cgroups / "cpu.max")
    return None if len(words) != 2 or words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(cgroups: Path) -> float | None:
    """Cores by the quota of cgroup v1, where -1 means none."""
    quota, period = (_words(cgroups / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return None if not (quota and period) or int(quota[0]) <= 0 else int(quota[0]) / int(period[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
