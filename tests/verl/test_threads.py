"""Threads by cores: affinity and the quotas of containers, against files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl import threads
from verl.threads import engine_threads, rank_threads, usable_cores


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "800000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_containers_quota_counts(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {one})
    assert usable_cores(tmp_path) == 1


@pytest.mark.usefixtures("sixteen_cores")
def test_those_who_work_at_once_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 16)
    assert [rank_threads(ranks) for ranks in (1, 2, 5, 32)] == [16, 8, 3, 1]
    assert [engine_threads(engines) for engines in (1, 2, 20)] == [15, 7, 1]
