"""What grew between two parts of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Series = dict[tuple[str, str], dict[int, float]]
"""By process and quantity: the value at the end of each step."""

EXPLAINING = ("own MiB", "mapped MiB", "shared MiB", "threads", "tokens a response")
"""What explains a growth and is none itself."""
SHOWN = ("rss MiB", "own MiB", "mapped MiB", "shared MiB", "handles", "threads")
COUNTED = ("handles", "processes", "objects", "objects MiB")


@dataclass(frozen=True)
class Windows:
    """The steps that are compared."""

    early: range
    late: range

    @classmethod
    def of(cls, after: int, width: int, last: int) -> Windows:
        """`width` steps around step `after`, and the last `width` ones. Raises `ValueError` when they overlap."""
        early = range(after - width // 2 + 1, after - width // 2 + 1 + width)
        late = range(last - width + 1, last + 1)
        if early.start < 1 or late.start < early.stop:
            raise ValueError(f"{last} steps are too few for {width} steps around step {after} and {width} at the end")
        return cls(early, late)


@dataclass(frozen=True)
class Growth:
    """What became of one quantity of one process; None in a window where it was never read."""

    process: str
    quantity: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float:
        """0.05: 5% more. Infinite for what was not there before."""
        if self.after is None or self.after == self.before:
            return 0.0
        return self.after / self.before - 1 if self.before else float("inf")

    def __str__(self) -> str:
        before, after = _cell(self.before), _cell(self.after)
        if self.quantity in COUNTED:
            return f"<= {before} -> >= {after}"
        return f"{before} -> {after} ({self.ratio:+.1%})"

    def grew(self, limit: float) -> bool:
        return self.quantity not in EXPLAINING and self.ratio > (0 if self.quantity in COUNTED else limit)


def growth_of(series: Series, windows: Windows) -> list[Growth]:
    """Of every process and quantity that was read in one of the windows."""
    found = [_growth(*key, values, windows) for key, values in series.items()]
    return [growth for growth in found if growth.before is not None or growth.after is not None]


def _growth(process: str, quantity: str, values: Mapping[int, float], windows: Windows) -> Growth:
    early, late = ([values[step] for step in window if step in values] for window in (windows.early, windows.late))
    if quantity in COUNTED:
        return Growth(process, quantity, max(early, default=None), min(late, default=None))
    return Growth(process, quantity, median(early) if early else None, median(late) if late else None)


def report(growths: Sequence[Growth], windows: Windows, limit: float) -> str:
    """A table in Markdown with a line a process, what the whole run has, and what grew."""
    early, late = (f"{window.start} to {window.stop - 1}" for window in (windows.early, windows.late))
    by_process: dict[str, dict[str, str]] = defaultdict(dict)
    for growth in growths:
        by_process[growth.process][growth.quantity] = str(growth)
    lines = [
        f"Steps {early} -> steps {late}",
        "",
        f"| process | {' | '.join(SHOWN)} |",
        "|---" * (len(SHOWN) + 1) + "|",
    ]
    for process, cells in by_process.items():
        if SHOWN[0] in cells:
            lines.append(f"| {process} | {' | '.join(cells.get(name, '') for name in SHOWN)} |")
    rest = [growth for growth in growths if SHOWN[0] not in by_process[growth.process]]
    lines += ["", *(f"{growth.process}, {growth.quantity}: {growth}" for growth in rest)]
    grown = [growth for growth in growths if growth.grew(limit)]
    lines += ["", *(f"GREW: {growth.process}, {growth.quantity}: {growth}" for growth in grown)]
    return "\n".join(lines + ([] if grown else [f"flat: no memory grew by more than {limit:.0%}, no count at all"]))


def _cell(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f}".removesuffix(".0")
