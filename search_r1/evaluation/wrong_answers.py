"""The questions without an exact match, as a readable page: what was asked, searched for, and answered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from search_r1.evaluation.records import Record

WRONG_ANSWERS = "wrong_answers.md"
_LONGEST = 500  # characters of a text


def is_wrong(record: Record) -> bool:
    """Whether the answer is wrong; failed questions are neither right nor wrong."""
    return not record.failed and record.metrics["em"] == 0


def wrong_answers(records: Sequence[Record]) -> str:
    """The page, by set, in the order of `records`."""
    wrong = [record for record in records if is_wrong(record)]
    finished = Counter(record.set_name for record in records if not record.failed)
    silent = sum(record.answer is None for record in wrong)
    lines = [
        "# Wrong answers",
        "",
        f"{len(wrong)} of {finished.total()} questions have no exact match, {silent} of them no answer at all. An id "
        "is the `group_id` of a row in trajectories.parquet, which has the episode as a whole.",
    ]
    for name in dict.fromkeys(record.set_name for record in wrong):
        of_set = [record for record in wrong if record.set_name == name]
        lines += ["", f"## {_shown(name)}: {len(of_set)} of {finished[name]}"]
        for record in of_set:
            lines += ["", f"### {_shown(record.key)}", "", *_lines(record)]
    return "\n".join(lines) + "\n"


def _lines(record: Record) -> Iterator[str]:
    metrics = record.metrics
    yield f"- question: {_shown(record.question)}"
    yield f"- gold answers: {' | '.join(map(_shown, record.golden_answers))}"
    yield f"- answer: {'none' if record.answer is None else _shown(record.answer)} ({record.status})"
    yield f"- searches: {' | '.join(map(_shown, record.queries)) or 'none'}"
    if metrics.get("retrieval_recall") is not None:
        yield f"- gold answer in the passages: {'yes' if metrics['retrieval_recall'] else 'no'}"
    scores = [f"{label} {metrics[name]:.2f}" for name, label in _SCORES.items() if metrics.get(name) is not None]
    yield f"- {', '.join(scores)}"


_SCORES = {"f1": "F1", "cover_em": "cover-EM", "judge": "judge"}


def _shown(text: str) -> str:
    """On one line, not too long, and as it stands: Markdown would swallow tags and read marks."""
    text = " ".join(text.split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", text) or "(empty)"
