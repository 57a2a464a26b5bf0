"""Make a corpus of the paragraphs that HotpotQA and 2WikiMultiHopQA publish with their questions, and question files.

    .venv/bin/search-r1 data contexts --set hotpotqa/dev hotpot_dev_distractor_v1.json --output_dir data/multihop

The folder gets corpus.jsonl, with each paragraph once, in the order in which the questions come, and SET/SPLIT.jsonl
with the questions, their answers and the titles of their gold paragraphs. Files are those of the authors, of FlashRAG,
or the Parquet files of the Hugging Face hub. Several files of a split are read one after the other, and --set may be
repeated. The folder appears once it is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from program_end import exit_status
from search_r1.data.corpus.command_line import table
from search_r1.data.documents.passages import WORDS, passages_of
from search_r1.data.qa.formats import QaRow
from search_r1.data.qa.paragraphs import Row, context, supporting_facts
from search_r1.data.qa.source_files import BadRows, read_questions
from search_r1.script_help import parser_of
from search_r1.search.corpus import passage_contents
from verl.errors import DataError
from verl.process.startup import PLAIN, log_to_stderr
from verl.process.storage import check_unused, whole_folder

_SET = re.compile(r"\w[\w.+-]*/\w[\w.+-]*")
_LEAST_WORDS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; returns the exit status, as `exit_status` says."""
    args = parse_arguments(argv)
    log_to_stderr(PLAIN)
    return exit_status(lambda: _run(args), "nothing was written")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, with `sets`: the files by SET/SPLIT. Ends the process on a wrong one."""
    parser = parser_of(__doc__, "python -m search_r1.data.contexts")
    add = parser.add_argument
    add(
        "--set",
        nargs="+",
        action="append",
        required=True,
        metavar=("SET/SPLIT", "FILE"),
        help="such as hotpotqa/train, and its files: .parquet, .json, .jsonl",
    )
    add("--output_dir", required=True, type=Path, help="the folder to make")
    add("--words", type=int, default=WORDS, help="words of a passage; a longer paragraph is cut (default: %(default)s)")
    add("--skip_bad_rows", action="store_true", help="list and leave out rows that cannot be used")
    args = parser.parse_args(argv)
    if args.words < _LEAST_WORDS:
        parser.error(f"--words {args.words} is less than {_LEAST_WORDS}")
    args.sets = {}
    for name, *files in args.set:
        if not _SET.fullmatch(name) or name in args.sets or not files:
            parser.error(f"--set {name}: give SET/SPLIT, such as hotpotqa/dev, each once, and after it its files")
        args.sets[name] = [Path(file).expanduser() for file in files]
    return args


def _run(args: argparse.Namespace) -> None:
    bad_rows = BadRows(args.skip_bad_rows)
    counts = write_contexts(args.sets, args.output_dir, args.words, bad_rows)
    for line in bad_rows.listed:
        print(f"skipped: {line}", file=sys.stderr)
    print(f"{args.output_dir}: {sum(row['passages'] for row in counts)} passages in corpus.jsonl")
    print("\n".join(table(counts)))


def write_contexts(
    sets: Mapping[str, Sequence[Path]], folder: Path, words: int = WORDS, bad_rows: BadRows | None = None
) -> list[dict[str, Any]]:
    """Write `folder` from the files of each SET/SPLIT; returns counts, a row for each.

    Counts are of questions, their paragraphs, those that are `new` to the corpus, the `passages` that these gave, and
    the questions `without_gold`, in whose contexts a gold title is missing. Memory grows with the distinct paragraphs
    and the questions of a split, not with their texts.

    Raises `ConfigError` if `folder` is in use, `DataError` for a file that cannot be read or has no contexts, and for a
    bad row unless `bad_rows` skips it, `StorageError` if the folder cannot be written. There is no folder then.
    """
    check_unused(folder)
    bad_rows = BadRows() if bad_rows is None else bad_rows
    with whole_folder(folder) as made, (made / "corpus.jsonl").open("w", encoding="utf-8") as file:
        corpus = _CorpusWriter(file, words)
        counts = []
        for name, files in sets.items():
            questions = made / f"{name}.jsonl"
            questions.parent.mkdir(exist_ok=True)
            with questions.open("w", encoding="utf-8") as written:
                counts.append({"set": name} | _write_set(written, files, corpus, bad_rows))
    return counts


class _CorpusWriter:
    """Writes each paragraph once. It keeps 16 bytes of each, which no two paragraphs share by chance."""

    def __init__(self, file: TextIO, words: int) -> None:
        self._file, self._words = file, words
        self._written = set[bytes]()
        self.num_passages = 0

    @property
    def num_paragraphs(self) -> int:
        return len(self._written)

    def add(self, paragraph: Row) -> None:
        """Write the passages of a paragraph, unless one with the same title and text was added before."""
        key = hashlib.blake2b(passage_contents(paragraph).encode(), digest_size=16).digest()
        if key in self._written:
            return
        self._written.add(key)
        for text in passages_of(paragraph["text"], self._words):
            row = {"id": str(self.num_passages), "contents": passage_contents(paragraph | {"text": text})}
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.num_passages += 1


def _write_set(written: TextIO, files: Sequence[Path], corpus: _CorpusWriter, bad_rows: BadRows) -> dict[str, int]:
    counts = dict.fromkeys(("questions", "paragraphs", "new", "passages", "without_gold"), 0)
    file_of_id: dict[str, Path] = {}
    before = corpus.num_paragraphs, corpus.num_passages
    for file in files:
        for row in read_questions(file, file.name.partition(".")[0], bad_rows):
            # the question and its paragraphs, or what is wrong with them
            try:
                question, paragraphs = _question(row)
                if row.id in file_of_id:
                    raise ValueError(f"the id stands already in {file_of_id[row.id]}")
            except ValueError as error:
                bad_rows.found(f"{file}: row {row.index} (question {row.id})", str(error))
                continue
            file_of_id[row.id] = file
            # both are written
            written.write(json.dumps(question, ensure_ascii=False) + "\n")
            for paragraph in paragraphs:
                corpus.add(paragraph)
            missing = set(question["metadata"]["supporting_facts"]["title"]) - {one["title"] for one in paragraphs}
            counts["questions"] += 1
            counts["paragraphs"] += len(paragraphs)
            counts["without_gold"] += bool(missing)
    if not file_of_id:
        raise DataError(f"{', '.join(map(str, files))}: no row has a question with its context")
    now = corpus.num_paragraphs, corpus.num_passages
    return counts | {"new": now[0] - before[0], "passages": now[1] - before[1]}


def _question(row: QaRow) -> tuple[Row, list[Row]]:
    """The question as a row of FlashRAG without its context, and the paragraphs with a text. Raises `ValueError`."""
    metadata = json.loads(row.metadata or "{}")
    paragraphs = [paragraph for paragraph in context(metadata) if paragraph["text"]]
    others = {key: value for key, value in metadata.items() if key != "context"}
    return {
        "id": row.id,
        "question": row.question,
        "golden_answers": row.golden_answers,
        "metadata": others | {"supporting_facts": supporting_facts(metadata)},
    }, paragraphs


if __name__ == "__main__":
    sys.exit(main())
