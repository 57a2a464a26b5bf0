"""What a stage found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    """SKIP: not asked for, impossible on this machine, or in need of a stage that has failed."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True)
class Result:
    """`figures` is one line, or the reason; `details` is Markdown for the report."""

    outcome: Outcome
    figures: str
    details: str = ""
    blocked: bool = False  # skipped because of a failure before it, so what needs it is skipped too
    seconds: float = 0.0

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Result:
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**found | {"outcome": Outcome(found["outcome"])})


def judged(passed: bool, figures: str, details: str = "") -> Result:
    return Result(Outcome.PASS if passed else Outcome.FAIL, figures, details)


def skipped(reason: str, blocked: bool = False) -> Result:
    return Result(Outcome.SKIP, reason, blocked=blocked)
