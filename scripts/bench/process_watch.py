"""What a run holds at one moment: memory, file handles and threads of each of its processes, and Ray's objects."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

MIB = 2**20
_OBJECTS = (("num local plasma objects", "objects", 1), ("pinned objects size", "objects MiB", MIB))
_PARTS = {"VmRSS": "rss MiB", "RssAnon": "own MiB", "RssFile": "mapped MiB", "RssShmem": "shared MiB"}
RUN = "whole run"
RAY = "Ray object store"

Reading = tuple[str, str, float]
"""Process, quantity, value."""


class ProcessWatch:
    """Reads a process, all its descendants, and the processes `others` with theirs."""

    def __init__(self, root: int, others: Sequence[int] = ()) -> None:
        self._roots = [psutil.Process(pid) for pid in (root, *others)]
        self._names: dict[psutil.Process, str] = {}
        self._ray: Path | None = None

    def read(self) -> Iterator[Reading]:
        """All readings of now. A process that ends meanwhile is left out."""
        running = 0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from self._read(process)
                running += 1
        yield RUN, "processes", running
        yield from self._objects()

    def _processes(self) -> Iterator[psutil.Process]:
        for root in self._roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from (root, *root.children(recursive=True))

    def _read(self, process: psutil.Process) -> Iterator[Reading]:
        name = self._names.setdefault(process, f"{role(process.cmdline())} {process.pid}")
        yield from ((name, quantity, value) for quantity, value in memory_mib(process.pid))
        yield name, "handles", process.num_fds()
        yield name, "threads", process.num_threads()

    def _objects(self) -> Iterator[Reading]:
        if self._ray is None:
            self._ray = next(filter(None, map(ray_state, self._processes())), None)
        if self._ray is not None and self._ray.exists():
            yield from ray_objects(self._ray.read_text())


def ray_state(process: psutil.Process) -> Path | None:
    """The file in which `process`, if it is a raylet, describes itself every 10 seconds.

    A raylet that is asked for the same by a call holds more memory with every answer, up to several MiB.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        command = process.cmdline()
        logs = re.search(r"--log_dir=(\S+)", " ".join(command))
        if logs and Path(command[0]).name == "raylet":
            return Path(logs[1]) / "debug_state.txt"
    return None


def ray_objects(state: str) -> Iterator[Reading]:
    """Objects in Ray's shared memory, and the size of those that somebody still refers to."""
    for line, quantity, unit in _OBJECTS:
        if found := re.search(rf"^- {line}: (\d+)$", state, re.MULTILINE):
            yield RAY, quantity, int(found[1]) / unit


def memory_mib(pid: int) -> Iterator[tuple[str, float]]:
    """Resident memory and its parts: own (heap, stacks), of mapped files (code), in shared memory (Ray's objects)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    for line in lines:
        name, _, value = line.partition(":")
        if name in _PARTS:
            yield _PARTS[name], int(value.split()[0]) / 1024


def role(command: Sequence[str]) -> str:
    """A short name of what a process does."""
    line = " ".join(command).strip()
    if titled := re.match(r"(?:ray|VLLM)::(\w+)", line):
        return titled[1]
    if module := re.search(r" -m (\S+)", line):
        return module[1]
    if code := re.search(r" -c from (\S+)", line):
        return code[1]
    scripts = [Path(part).stem for part in command[1:] if part.endswith((".py", ".sh"))]
    return scripts[0] if scripts else Path(line.partition(" ")[0]).name
