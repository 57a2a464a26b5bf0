"""Question-answer files in the FlashRAG format to prompt files for training.

    python -m search_r1.data.qa_jsonl --input nq=nq/test.jsonl hotpotqa=hotpotqa/dev.jsonl --output train.parquet

Each input line is `{"id", "question", "golden_answers": [..]}`; rows of several sets are written one after the other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from search_r1.llm_agent.templates import load_template
from verl.errors import DataError


def prompt_rows(data_source: str, path: Path, template: str, split: str) -> Iterator[dict[str, Any]]:
    """One row a question, in the schema that training reads. Raises `DataError` naming file and line."""
    prompt_template = load_template(template)
    with path.open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            question, answers = _parse(line, path, index + 1)
            yield {
                "data_source": data_source,
                "prompt": prompt_template.messages(question),
                "ability": "fact-reasoning",
                "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
                "extra_info": {"split": split, "index": index},
            }


def _parse(line: str, path: Path, number: int) -> tuple[str, list[str]]:
    try:
        row = json.loads(line)
        question, answers = row["question"].strip(), row["golden_answers"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}:{number}: needs question and golden_answers: {error!r}") from error
    if not question or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{path}:{number}: question is empty, or golden_answers is not a list of strings")
    return question if question.endswith("?") else question + "?", answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="SOURCE=FILE", help="data source and its jsonl file"
    )
    parser.add_argument("--output", required=True, type=Path, help="the parquet file to write")
    parser.add_argument("--template", default="search_r1", help="name or path of a prompt template")
    parser.add_argument("--split", default="train", help="recorded in extra_info")
    parser.add_argument("--limit", type=int, help="at most this many rows of each file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for item in args.input:
        data_source, _, path = item.partition("=")
        rows += list(prompt_rows(data_source, Path(path), args.template, args.split))[: args.limit]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), args.output)
    print(f"{len(rows)} prompts -> {args.output}")


if __name__ == "__main__":
    main()
