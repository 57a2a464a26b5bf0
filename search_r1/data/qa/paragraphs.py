"""The paragraphs that a question of several hops comes with, and which of them are gold, in its metadata.

HotpotQA and 2WikiMultiHopQA have a `context` and `supporting_facts`. Each is a table in columns (`{"title": [..],
"sentences": [..]}`), in pairs (`[[title, sentences], ..]`), or the JSON text of one of these. MuSiQue has
`question_decomposition` or `paragraphs`. A paragraph is returned as a row `{"title", "text"}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from search_r1.search.sanitize import whole_characters

Metadata = Mapping[str, Any]
Row = dict[str, Any]


def context(metadata: Metadata) -> list[Row]:
    """All paragraphs of the `context`, in order; the text is "" for one without sentences.

    Raises `ValueError` with the reason if there is none, if it is empty, or if it has another form.
    """
    with _explained("paragraphs"):
        if "context" not in metadata:
            raise ValueError("there is no 'context', which HotpotQA and 2WikiMultiHopQA have")
        found = list(_context(metadata["context"]))
        if not found:
            raise ValueError("context: it has no paragraph")
        return found


def supporting_facts(metadata: Metadata) -> dict[str, list[Any]]:
    """The titles and the numbers of the supporting sentences in columns, `title` and `sent_id`; both are empty if there
    are none. Raises `ValueError` with the reason for facts of another form.
    """
    with _explained("supporting facts"):
        facts = _facts(metadata)
        return {"title": [title for title, _ in facts], "sent_id": [number for _, number in facts]}


def gold_titles(metadata: Metadata) -> list[str]:
    """The titles of the gold passages of a question, each once, in the order of its metadata; [] if that names none.

    They are those of `supporting_facts`, of the steps of `question_decomposition`, of the `paragraphs` that are marked
    as supporting, or of the list `titles`. Raises `ValueError` with the reason for metadata of another form.
    """
    with _explained("gold titles"):
        titles = [title for title, _ in _facts(metadata)] or [str(one["title"]) for one in _marked(metadata)]
        return list(dict.fromkeys(titles or _titles(metadata)))


def gold_paragraphs(metadata: Metadata) -> list[Row]:
    """The paragraphs that the answer follows from; [] if the metadata has none. Raises `ValueError` with the reason."""
    with _explained("gold paragraphs"):
        found = list(_marked(metadata))
        if "context" in metadata and "supporting_facts" in metadata:
            titles = {title for title, _ in _facts(metadata)}
            found = [one for one in _context(metadata["context"]) if one["title"] in titles] + found
        return found


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise a `ValueError` for what a malformed value raises."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = error if type(error) is ValueError else repr(error)
        raise ValueError(
            f"the {what} in its metadata cannot be read ({reason}); docs/retrieval.md lists the forms that can"
        ) from error


def _titles(metadata: Metadata) -> list[str]:
    titles = metadata.get("titles") or []
    if not isinstance(titles, list) or not all(isinstance(title, str) for title in titles):
        raise ValueError(f"titles: {titles!r} is no list of texts")
    return titles


def _facts(metadata: Metadata) -> list[tuple[str, Any]]:
    facts = _table("supporting_facts", metadata.get("supporting_facts") or [], "sent_id")
    return [(str(title), number) for title, number in facts]


def _context(value: Any) -> Iterator[Row]:
    for number, (title, sentences) in enumerate(_table("context", value, "sentences", "content"), start=1):
        if not isinstance(title, str) or len(title.splitlines()) != 1:
            raise ValueError(f"context: the title of paragraph {number} is {title!r}, not a line of text")
        if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
            raise ValueError(f"context: paragraph {number}, {title!r}, has no list of sentences that are texts")
        yield {"title": title, "text": " ".join(" ".join(sentences).split())}


def _marked(metadata: Metadata) -> Iterator[Row]:
    """The paragraphs of the steps of MuSiQue, and those that it marks as supporting."""
    steps = [step.get("support_paragraph") for step in metadata.get("question_decomposition") or []]
    marked = [paragraph for paragraph in metadata.get("paragraphs") or [] if paragraph["is_supporting"]]
    for paragraph in [*filter(None, steps), *marked]:
        yield {"title": paragraph["title"], "text": paragraph["paragraph_text"]}


def _table(name: str, value: Any, *columns: str) -> list[tuple[Any, Any]]:
    """The pairs (title, other) of a table; `columns` are the names that the column of the others may have."""
    if isinstance(value, str):
        value = whole_characters(json.loads(value))
    if not isinstance(value, dict):
        return [(title, other) for title, other in value]
    column = next((column for column in columns if column in value), columns[0])
    titles, others = value["title"], value[column]
    if len(titles) != len(others):
        raise ValueError(f"{name}: it has {len(titles)} titles, but {len(others)} entries in {column}")
    return list(zip(titles, others, strict=True))
