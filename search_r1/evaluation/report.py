"""The results as a page of Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from search_r1.evaluation.statistics import BOOTSTRAP, CALIBRATION_BIN, WILSON
from search_r1.evaluation.store import METRICS, SCORES, WRONG_ANSWERS, Record

_COST = ("searches", "calls", "policy_tokens", "total_tokens", "invalid_actions", "latency_s")
_LONGEST = 500  # characters of a text


def report(results: Mapping[str, Any]) -> str:
    """A table of quality, one of cost, the coverage of the corpus if it was measured, and the settings."""
    parts = [
        "# Evaluation",
        f"{results['questions']} questions, {results['failed']} failed (left out of all means), {results['wrong']} "
        f"answered wrongly: [{WRONG_ANSWERS}]({WRONG_ANSWERS}).",
        _intervals(results),
        _table_of(results, SCORES, "in percent"),
        _table_of(results, _COST, "a question"),
    ]
    if any("calibration" in row for row in results["sets"].values()):
        parts += ["## Calibration", _calibration(results["sets"])]
    if results.get("coverage"):
        parts += ["## Coverage of the corpus", _coverage(results["coverage"])]
    if not results["run"]["exact_token_ids"]:
        parts.append(
            "The server gave text without token ids: contexts of later turns and token counts are approximate, and "
            "there are no log-probs."
        )
    parts += ["## Settings", markdown_table(("setting", "value"), _flat(results["settings"] | results["run"]))]
    return "\n\n".join(parts) + "\n"


def _intervals(results: Mapping[str, Any]) -> str:
    """A paragraph on the intervals of the page: which metrics have which kind. F1 may have both, as one set may have
    only 0 and 1.
    """
    rows = [row["metrics"] for row in results["sets"].values()] + [results["macro"], results["micro"]]

    def named(kind: str) -> str:
        having = (name for name in METRICS if any(name in row and row[name]["interval"] == kind for row in rows))
        return ", ".join(METRICS[name] for name in having) or "none"

    return (
        f"In brackets: 95% intervals. A share of questions (a score that is 0 or 1 for each of a set) has Wilson's: "
        f"{named(WILSON)}. "
        f"Other means have a percentile bootstrap, {results['resamples']} resamples of the questions within their "
        f"sets: {named(BOOTSTRAP)}."
    )


def _table_of(results: Mapping[str, Any], names: Sequence[str], unit: str) -> str:
    shown = [name for name in names if name in results["micro"]]
    rows = [(name, row["questions"] - row["failed"], row["metrics"]) for name, row in results["sets"].items()]
    count = results["questions"] - results["failed"]
    rows += [("macro mean", count, results["macro"]), ("micro mean", count, results["micro"])]
    head = (unit, "questions", *(METRICS[name] for name in shown))
    return markdown_table(
        head, ((label, str(n), *(_cell(name, row.get(name)) for name in shown)) for label, n, row in rows)
    )


def _cell(name: str, estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    scale, digits = (100, 1) if name in SCORES else (1, 2)
    mean, low, high = (f"{scale * estimate[key]:.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _calibration(sets: Mapping[str, Any]) -> str:
    rows = [(name, row["calibration"]) for name, row in sets.items() if "calibration" in row]
    head = ("set", "answers with a confidence", "confidence", "right (by)", "error", "error as BrowseComp-Plus has it")
    return (
        "In percent. The error is the root mean square distance of confidence and share of right answers, over bins of "
        f"{CALIBRATION_BIN} answers of like confidence; BrowseComp-Plus leaves out the bin of the highest ones.\n\n"
        + markdown_table(
            head,
            (
                (
                    name,
                    str(row["answers"]),
                    f"{100 * row['confidence']:.1f}",
                    f"{100 * row['right']:.1f} ({METRICS[row['right_by']]})",
                    f"{100 * row['error']:.1f}",
                    "-" if row["error_as_published"] is None else f"{100 * row['error_as_published']:.1f}",
                )
                for name, row in rows
            ),
        )
    )


def _coverage(coverage: Mapping[str, Any]) -> str:
    """The table of coverage. Shares are of the questions with an answer to look for; recall searches by question."""
    ks = list(coverage["total"].get("recall", {}))
    head = ("set", "questions", "yes/no", "with a span", "in the corpus", *(f"in the top {k}" for k in ks))
    rows = [*coverage["sets"].items(), ("total", coverage["total"])]
    return f"{coverage['passages']} passages of {coverage['corpus']}.\n\n" + markdown_table(
        head, ((name, *_coverage_cells(row, ks)) for name, row in rows)
    )


def _coverage_cells(row: Mapping[str, Any], ks: Sequence[str]) -> Iterable[str]:
    yield from (str(row[name]) for name in ("questions", "yes_no", "span"))
    yield f"{row['covered']} ({_percent(row['coverage'])})"
    for k in ks:
        found = row["recall"][k]
        yield f"{found['hits']} ({_percent(found['of_all'])}; of those in the corpus {_percent(found['of_covered'])})"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", str(value).replace("|", "\\|").replace("\n", " ")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# The questions without an exact match, as a readable page: what was asked, searched for, and answered.


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
    """`text` on one line, not too long, with Markdown's own characters escaped: it would swallow tags."""
    text = " ".join(text.split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", text) or "(empty)"
