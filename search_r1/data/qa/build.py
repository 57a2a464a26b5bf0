"""Write the questions of several sets into one prompt file: its schema, its rows, and the file as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from search_r1.data.qa.question import QaRow
from search_r1.data.qa.reading import BadRows, read_questions
from search_r1.data.qa.retrieved import Contexts
from search_r1.data.qa.source_files import QuestionFile
from search_r1.llm_agent.templates import FINGERPRINT_KEY, TEMPLATE_KEY, Template
from verl.errors import DataError

_ROWS_A_SEARCH = 1024
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        (
            "reward_model",
            pa.struct([("style", pa.string()), ("ground_truth", pa.struct([("target", pa.list_(pa.string()))]))]),
        ),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64())])),
        ("id", pa.string()),
        ("question", pa.string()),
        ("golden_answers", pa.list_(pa.string())),
        # JSON text: the sets have different fields, and one column has one type.
        ("metadata", pa.string()),
    ]
)
_ROWS_A_GROUP = 4096


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


# The prompt file, which appears only once it is complete.


def prompt_row(row: QaRow, data_source: str, split: str, template: Template, context: str | None) -> dict[str, Any]:
    """A row of `SCHEMA`. `split` is train or test, the use of the row."""
    return {
        "data_source": data_source,
        "prompt": template.messages(row.question, context),
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": row.golden_answers}},
        "extra_info": {"split": split, "index": row.index},
        "id": row.id,
        "question": row.question,
        "golden_answers": row.golden_answers,
        "metadata": row.metadata,
    }


def write_prompts(path: Path, rows: Iterable[Mapping[str, Any]], template: Template) -> int:
    """Write `path`, in groups of rows, and return the number of rows. Until it is complete, it has another name.

    The file's metadata has the template's name and fingerprint. Raises `DataError` if there are no rows.
    """
    schema = SCHEMA.with_metadata({TEMPLATE_KEY: template.name, FINGERPRINT_KEY: template.fingerprint})
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    remaining, count = iter(rows), 0
    try:
        with pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
            while group := list(islice(remaining, _ROWS_A_GROUP)):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
                count += len(group)
        if count == 0:
            raise DataError(f"{path}: there are no questions to write")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count
