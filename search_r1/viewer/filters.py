"""The filters for the list of trajectories, as query parameters and as SQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Condition = tuple[str, Any]  # a piece of SQL with one `?`, and its value

MAX_PAGE = 500
SORTS = {
    "step": "step",
    "reward": "reward",
    "data_source": "data_source",
    "status": "status",
    "searches": "num_searches",
    "turns": "num_turns",
    "tokens": "len(loss_mask)",
    "question": "question",
    "component": "reward_components[?]",
}
_RANGES = {
    "min_reward": "reward >= ?",
    "max_reward": "reward <= ?",
    "min_searches": "num_searches >= ?",
    "max_searches": "num_searches <= ?",
    "min_tokens": "len(loss_mask) >= ?",
    "max_tokens": "len(loss_mask) <= ?",
    "source": "data_source = ?",
    "status": "status = ?",
    "group": "group_id = ?",
    "question": "contains(lower(question), lower(?))",
    "text": "contains(lower(response_text), lower(?))",
}


class Filters(BaseModel):
    """Filters of the list of rows. All are optional, and all must match. `text` and `question` match anywhere, ignoring
    case.

    `component` names a reward component, to which `min_component`, `max_component` and sort `component` apply. Lengths
    are in tokens of the whole trajectory, including its prompt.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str | None = None
    step: int | None = None
    source: str | None = None
    status: str | None = None
    group: str | None = None
    question: str | None = None
    text: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_searches: int | None = None
    max_searches: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    component: str | None = None
    min_component: float | None = None
    max_component: float | None = None
    sort: Literal["step", "reward", "data_source", "status", "searches", "turns", "tokens", "question", "component"] = (
        "step"
    )
    descending: bool = False
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=50, ge=1, le=MAX_PAGE)

    @model_validator(mode="after")
    def _named(self) -> Self:
        asks = self.min_component is not None or self.max_component is not None or self.sort == "component"
        if asks and self.component is None:
            raise ValueError("component is missing: min_component, max_component and sort=component are about one")
        return self

    def conditions(self) -> Iterator[Condition]:
        """The conditions on a row, without kind and step, which select files."""
        for name, sql in _RANGES.items():
            value = getattr(self, name)
            if value is not None:
                yield sql, value

    def component_conditions(self) -> Iterator[tuple[str, list[Any]]]:
        """The conditions on a component; each has two values."""
        for sign, limit in ((">=", self.min_component), ("<=", self.max_component)):
            if limit is not None:
                yield f"reward_components[?] {sign} ?", [self.component, limit]

    def where(self) -> tuple[str, list[Any]]:
        """A WHERE clause (or an empty text) and its values."""
        found = [(sql, [value]) for sql, value in self.conditions()] + list(self.component_conditions())
        clause = " AND ".join(f"({sql})" for sql, _ in found)
        return (f"WHERE {clause}" if found else ""), [value for _, values in found for value in values]

    def order(self) -> tuple[str, list[Any]]:
        """An ORDER BY clause that orders all rows unambiguously, and its values."""
        way = "DESC" if self.descending else "ASC"
        values = [self.component] if self.sort == "component" else []
        return f"ORDER BY {SORTS[self.sort]} {way} NULLS LAST, filename, file_row_number", values


class RowsQuery(Filters):
    """A page of the list of a run."""

    run: str


class CompareQuery(Filters):
    """A page of the questions of two files."""

    run: str
    file: str
    other_run: str
    other_file: str
