"""A stored trajectory as Markdown that a person can read."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
READING_COLUMNS = (
    "group_id",
    "data_source",
    "ground_truth",
    "status",
    "failure",
    "reward",
    "num_turns",
    "num_searches",
    "prompt_text",
    "segments",
)
TURN_TAG = re.compile(r"(?=<(?:think|search|answer)>)")


def choose_three(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Up to three different trajectories with a caption: solved with several searches, not solved, and any other.

    Solved means a positive reward; among several, the highest reward wins, then the most searches. As the unsolved one,
    a wrong answer is preferred to an infrastructure failure.
    """
    left = list(rows)
    chosen: list[tuple[str, Row]] = []

    def take(caption: str, candidates: list[Row], key: Callable[[Row], Any] | None = None) -> None:
        if not candidates:
            return
        row = max(candidates, key=key) if key else random.Random(0).choice(candidates)
        left.remove(row)
        chosen.append((caption, row))

    solved = [row for row in left if (row["reward"] or 0) > 0]
    several = [row for row in solved if row["num_searches"] >= 2]
    take("Solved with several searches" if several else "Solved", several or solved, _reward_and_searches)
    wrong = [row for row in left if row["reward"] is not None and row["reward"] <= 0]
    take("Not solved", wrong or [row for row in left if row["status"] == "failed"], _reward_and_searches)
    take("Drawn at random", left)
    return chosen


def _reward_and_searches(row: Row) -> tuple[float, int]:
    return row["reward"] or 0.0, row["num_searches"]


def render_trajectory(row: Row) -> str:
    """Facts of the row, then the prompt and each segment: what the policy wrote as text, all else as a quotation."""
    blocks = [_facts(row), _quote("prompt", row["prompt_text"])]
    for segment in row["segments"]:
        if segment["source"] == "policy":
            blocks.append(_policy(segment["text"]))
        elif segment["source"] == "environment":
            blocks.append(_quote("environment", segment["text"]))
    return "\n\n".join(block for block in blocks if block)


def _facts(row: Row) -> str:
    reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
    facts = [
        f"data source {row['data_source']}",
        f"status {row['status']}",
        f"reward {reward}",
        f"{row['num_turns']} turns",
        f"{row['num_searches']} searches",
    ]
    if row["ground_truth"] is not None:
        truth = row["ground_truth"]
        target = truth.get("target", truth) if isinstance(truth, dict) else truth
        answers = target if isinstance(target, list) else [target]
        facts.append("expected " + " or ".join(f"`{answer}`" for answer in answers))
    if row["failure"]:
        facts.append(f"failure: {row['failure']}")
    return ", ".join(facts) + "."


def _policy(text: str) -> str:
    """A policy turn as one fenced block, each tag on a line of its own."""
    parts = [part.strip() for part in TURN_TAG.split(text)]
    return _fence("\n".join(part for part in parts if part))


def _quote(title: str, text: str) -> str:
    body = _fence(text.strip())
    return "\n".join(f"> {line}".rstrip() for line in [f"*{title}*", "", *body.splitlines()])


def _fence(text: str) -> str:
    """`text` in a fenced block; the fence is longer than any run of backquotes inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
