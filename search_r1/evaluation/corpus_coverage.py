"""Whether the gold answers can be found at all: in the corpus, and by a search for the plain question."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_r1.data.corpus.audit import matcher_of, recall, scan_corpus, server_ranks, summarize
from search_r1.data.corpus.gold_questions import make_question
from search_r1.errors import CorpusError, RetrieverError
from search_r1.evaluation.methods.base import text_of
from search_r1.evaluation.questions import Question
from verl.errors import DataError, EnvironmentUnavailable


def corpus_coverage(corpus: Path, questions: Sequence[Question], url: str | None, topk: int) -> dict[str, Any]:
    """`corpus`, `passages`, and a row for each of `sets` and their `total`, as in `search_r1.data.corpus.audit`.

    Without a `url`, nothing is searched, and the rows have no `recall`. Raises `DataError` for a bad corpus and for
    questions without a text, `EnvironmentUnavailable` if the retriever does not answer.
    """
    searched = [make_question(question.id, text_of(question), question.golden_answers) for question in questions]
    ks = sorted({1, topk})
    try:
        ranks = None if url is None else asyncio.run(server_ranks(url, searched, topk))
        num_passages, found = scan_corpus(corpus, matcher_of(searched))
    except CorpusError as error:
        raise DataError(str(error)) from error
    except RetrieverError as error:
        raise EnvironmentUnavailable(str(error)) from error

    def row(places: Sequence[int]) -> dict[str, Any]:
        part = [searched[place] for place in places]
        counts = summarize(part, found)
        return counts if ranks is None else counts | {"recall": recall(part, found, [ranks[i] for i in places], ks)}

    names = dict.fromkeys(question.set_name for question in questions)
    sets = {name: row([i for i, question in enumerate(questions) if question.set_name == name]) for name in names}
    total = row(range(len(questions)))
    return {"corpus": str(corpus), "passages": num_passages, "url": url, "sets": sets, "total": total}
