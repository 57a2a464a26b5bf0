"""How much memory a rank took in each phase of a step, and when it worked: for metrics and timeline."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from verl.engine.device.memory import DeviceMemory
from verl.phases import Phase

GIB = 2**30
Method = TypeVar("Method", bound=Callable[..., Any])


class MemoryMeter:
    """Peak memory by phase since the last `metrics`."""

    def __init__(self, memory: DeviceMemory, role: str) -> None:
        self._memory, self._role = memory, role
        self._most: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count the memory used inside for `phase`."""
        self._memory.restart_peak()
        yield
        self.note(phase)

    def note(self, phase: Phase) -> None:
        """Count the peak since `during` began, and the memory in use now."""
        usage = self._memory.usage()
        self._count(f"memory_gib/{phase}/{self._role}", usage.process)
        if usage.device is not None:
            self._count(f"memory_gib/{phase}/device", usage.device)

    def metrics(self) -> dict[str, float]:
        """`memory_gib/{phase}/{role}`: of this process; on a GPU the peak of PyTorch's allocator.
        `memory_gib/{phase}/device`: of all processes together on its GPU.
        """
        most, self._most = self._most, {}
        return most

    def _count(self, name: str, num_bytes: int) -> None:
        self._most[name] = max(self._most.get(name, 0.0), num_bytes / GIB)


def in_phase(phase: Phase) -> Callable[[Method], Method]:
    """Count the memory and the time that a method takes; its object has a `MemoryMeter` named `memory` and a
    `SpanRecorder` named `spans`.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def counted(self: Any, *args: Any, **named: Any) -> Any:
            with self.spans(method.__name__), self.memory.during(phase):
                return method(self, *args, **named)

        return counted  # type: ignore[return-value]

    return decorate
