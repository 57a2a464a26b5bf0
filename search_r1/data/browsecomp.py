"""Make a corpus and a question file of BrowseComp-Plus, whose files you have: nothing is downloaded here.

    .venv/bin/search-r1 data browsecomp --queries browsecomp_plus_decrypted.jsonl --corpus corpus/*.parquet \\
        --output_dir data/browsecomp_plus

--queries is the file that the set's own script decrypts: {"query_id", "query", "answer"} and, in gold_docs and
evidence_docs, documents. Evidence may also come from --qrels, the set's qrel_evidence.txt. --corpus has {"docid",
"text", "url"}, as Parquet or JSON lines. The folder gets corpus.jsonl, a row for each document, and
browsecomp_plus/test.jsonl, with the ids of the evidence in the metadata. It appears once it is complete.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from program_end import exit_status
from search_r1.script_help import parser_of
from search_r1.search.sanitize import whole_characters
from verl.errors import DataError
from verl.process.startup import PLAIN, log_to_stderr
from verl.process.storage import check_unused, whole_folder

SET = "browsecomp_plus"
_TITLE = re.compile(r"\A---\n(?:(?!---).*\n)*?title: *(.+)\n")  # of the front matter that most documents begin with
_ENCRYPTED = re.compile(r"[A-Za-z0-9+/]{24,}={0,2}")
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; returns the exit status, as `exit_status` says."""
    args = parse_arguments(argv)
    log_to_stderr(PLAIN)
    return exit_status(lambda: _run(args), "nothing was written")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments. Ends the process on a wrong one."""
    parser = parser_of(__doc__, "python -m search_r1.data.browsecomp")
    add = parser.add_argument
    add("--queries", required=True, type=Path, help="the decrypted questions, JSON lines")
    add("--corpus", required=True, nargs="+", type=Path, help="the documents: .parquet or .jsonl, one file or several")
    add("--qrels", type=Path, help="qrel_evidence.txt, in place of the evidence in --queries")
    add("--output_dir", required=True, type=Path, help="the folder to make")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> None:
    counts = write_browsecomp(args.queries, args.corpus, args.output_dir, args.qrels)
    print(f"{args.output_dir}/corpus.jsonl: {counts['documents']} documents")
    print(f"{args.output_dir}/{SET}/test.jsonl: {counts['questions']} questions with {counts['evidence']} documents")


def write_browsecomp(queries: Path, corpus: Sequence[Path], folder: Path, qrels: Path | None = None) -> dict[str, int]:
    """Write `folder`; returns the numbers of `documents`, `questions` and, over all questions, `evidence` documents.

    Raises `ConfigError` if `folder` is in use, `StorageError` if it cannot be written, and `DataError`, with the place,
    for a row that is not as published, a repeated id, a question without evidence, and for evidence that is not in the
    corpus. There is no folder then.
    """
    check_unused(folder)
    # The questions are read to their end first: a fault in them is found before the long writing of the corpus.
    questions = list(_questions(queries, None if qrels is None else _read_qrels(qrels)))
    with whole_folder(folder) as made:
        # Of the documents only the ids stay in memory: they show repeated ids, and evidence that is not there.
        documents: set[str] = set()
        with (made / "corpus.jsonl").open("w", encoding="utf-8") as file:
            for place, row in _rows_of(corpus):
                document = _document(row, place)
                if document["id"] in documents:
                    raise DataError(f"{place}: document {document['id']} has come before")
                documents.add(document["id"])
                file.write(json.dumps(document, ensure_ascii=False) + "\n")
        for question in questions:
            missing = [name for name in question["metadata"]["evidence"] if name not in documents]
            if missing:
                raise DataError(f"{queries}: question {question['id']} has evidence that --corpus lacks: {missing[:5]}")
        (made / SET).mkdir()
        lines = [json.dumps(question, ensure_ascii=False) + "\n" for question in questions]
        (made / SET / "test.jsonl").write_text("".join(lines), encoding="utf-8")
    evidence = sum(len(question["metadata"]["evidence"]) for question in questions)
    return {"documents": len(documents), "questions": len(questions), "evidence": evidence}


def _questions(path: Path, qrels: Mapping[str, list[str]] | None) -> Iterator[Row]:
    """The questions as rows of FlashRAG. Raises `DataError`."""
    seen: set[str] = set()
    for place, row in _rows_of([path]):
        name, question, answer = (_text(row, key, place) for key in ("query_id", "query", "answer"))
        # The set is published encrypted, as Base64: one long word instead of a question.
        if _ENCRYPTED.fullmatch(question):
            raise DataError(f"{place}: the question is encrypted; run the set's own script that decrypts it")
        if name in seen:
            raise DataError(f"{place}: question {name} has come before")
        seen.add(name)
        evidence = _ids(row, "evidence_docs", place) if qrels is None else qrels.get(name, [])
        if not evidence:
            wanted = "no 'evidence_docs': give --qrels" if qrels is None else "no evidence in --qrels"
            raise DataError(f"{place}: question {name} has {wanted}")
        metadata = {"evidence": evidence, "gold": _ids(row, "gold_docs", place)}
        yield {"id": name, "question": question, "golden_answers": [answer], "metadata": metadata}


def _document(row: Row, place: str) -> Row:
    """A row of the corpus: the title is that of its front matter, else its address, else its id. Raises `DataError`."""
    name, text = _text(row, "docid", place), _text(row, "text", place)
    url = str(row.get("url") or "")
    found = _TITLE.match(text)
    title = " ".join((found[1] if found else url or name).replace('"', "'").split())
    return {"id": name, "contents": f'"{title}"\n{text}'} | ({"url": url} if url else {})


def _ids(row: Row, key: str, place: str) -> list[str]:
    """The ids of the documents of a question, each once."""
    documents = row.get(key) or []
    if not (isinstance(documents, list) and all(isinstance(one, dict) for one in documents)):
        raise DataError(f"{place}: {key!r} is {documents!r:.100}, not a list of documents")
    return list(dict.fromkeys(_text(one, "docid", f"{place}, {key}") for one in documents))


def _text(row: Row, key: str, place: str) -> str:
    value = row.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: {key!r} is {value!r:.100}, not a text")
    return whole_characters(value)


def _read_qrels(path: Path) -> dict[str, list[str]]:
    """The relevant documents by question, of lines `QUESTION 0 DOCUMENT RELEVANCE`."""
    found: dict[str, list[str]] = defaultdict(list)
    for number, line in _lines(path):
        parts = line.split()
        if len(parts) != 4 or not parts[3].lstrip("-").isdigit():
            raise DataError(f"{path}: line {number} is {line[:100]!r}, not QUESTION 0 DOCUMENT RELEVANCE")
        if int(parts[3]) > 0 and parts[2] not in found[parts[0]]:
            found[parts[0]].append(parts[2])
    return found


def _rows_of(paths: Sequence[Path]) -> Iterator[tuple[str, Row]]:
    """(place, row) of Parquet files and files of JSON lines, which are not held in memory. Raises `DataError`."""
    for path in paths:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
            continue
        for number, line in _lines(path):
            place = f"{path}: line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{place} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{place} is no JSON object")
            yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of the lines that are not blank. Raises `DataError`."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
