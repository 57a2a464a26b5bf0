"""One line of a preflight: what was checked, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.errors import ConfigError


@dataclass(frozen=True)
class Finding:
    """A check's result. `level` FAIL: the run would end with an error; `what` names the thing, `found` its state."""

    level: Literal["ok", "warn", "FAIL"]
    what: str
    found: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4} {self.what}: {self.found}" + (f"; {self.todo}" if self.todo else "")


def judge(good: bool, what: str, found: str, todo: str, otherwise: Literal["warn", "FAIL"] = "FAIL") -> Finding:
    """A finding: ok, or `otherwise` with what to do."""
    return Finding("ok", what, found) if good else Finding(otherwise, what, found, todo)


def require(finding: Finding) -> None:
    """Raise ConfigError for a FAIL."""
    if finding.level == "FAIL":
        raise ConfigError(f"{finding.what}: {finding.found}; {finding.todo}")
