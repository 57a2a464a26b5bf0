"""Write the questions of several sets into one prompt file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from search_r1.data.qa.prompt_file import prompt_row, write_prompts
from search_r1.data.qa.question import QaRow
from search_r1.data.qa.reading import BadRows, read_questions
from search_r1.data.qa.retrieved import Contexts
from search_r1.data.qa.source_files import QuestionFile
from search_r1.llm_agent.templates import Template

_ROWS_A_SEARCH = 1024


@dataclass
class PromptBuilder:
    """Writes prompt files with one template."""

    template: Template
    limit: int | None = None
    """The maximum number of questions from each source."""
    bad_rows: BadRows = field(default_factory=BadRows)

    def write(
        self, path: Path, sources: Sequence[QuestionFile], split: str, contexts: Contexts | None = None
    ) -> list[int]:
        """Write the questions of the `sources`, in order, as `train` or `test`; returns the number from each.

        Raises `DataError` (see `read_questions` and `Contexts`), and leaves `path` unchanged then.
        """
        counts = [0] * len(sources)

        def rows() -> Iterator[dict[str, Any]]:
            for number, source in enumerate(sources):
                questions = islice(read_questions(source.path, source.split, self.bad_rows), self.limit)
                for row, context in _with_context(questions, contexts):
                    counts[number] += 1
                    yield prompt_row(row, source.data_source, split, self.template, context)

        write_prompts(path, rows(), self.template)
        return counts


def _with_context(rows: Iterator[QaRow], contexts: Contexts | None) -> Iterator[tuple[QaRow, str | None]]:
    if contexts is None:
        yield from ((row, None) for row in rows)
        return
    while batch := list(islice(rows, _ROWS_A_SEARCH)):
        yield from zip(batch, contexts.of(batch), strict=True)
