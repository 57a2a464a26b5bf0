"""Which file of a set to read, in data processing and evaluation (from a folder, FlashRAG's collection, or by name),
and its validated questions.

Training uses `train`; testing uses `test`, else `dev`, else `train`. If the set is known to have a split but its file
is missing, that is an error, and no other split replaces it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from search_r1.data.qa.formats import Format, QaRow, checked, format_of, known_formats
from search_r1.data.qa.records import FileRow, kind_of, place, read_records
from verl.errors import DataError

_SUFFIXES = (".jsonl", ".json", ".tsv", ".csv")
_SPLITS = {"train": ("train",), "test": ("test", "dev", "train")}
_KINDS = (*_SUFFIXES, ".parquet")
_NAME = re.compile(r"\w[\w.+-]*")
FLASHRAG_REPO = "RUC-NLPIR/FlashRAG_datasets"


@dataclass(frozen=True)
class QaSet:
    """A set, with its name in the FlashRAG collection, which is also its `data_source`."""

    name: str
    splits: tuple[str, ...]
    """The splits among `train`, `dev` and `test` that FlashRAG has."""
    originals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By split: patterns of the file names under which the set's authors publish it."""


SETS = {
    found.name: found
    for found in (
        # The test questions of NQ and TriviaQA are what their authors call dev.
        QaSet("nq", ("train", "dev", "test"), {"train": ("NQ-open.train.jsonl",), "test": ("NQ-open.dev.jsonl",)}),
        QaSet(
            "triviaqa",
            ("train", "dev", "test"),
            {"train": ("unfiltered-web-train.json",), "test": ("unfiltered-web-dev.json",)},
        ),
        QaSet("popqa", ("test",), {"test": ("popQA.tsv",)}),
        QaSet(
            "hotpotqa",
            ("train", "dev"),
            {
                "train": ("hotpot_train_v1*.json",),
                "dev": ("hotpot_dev_fullwiki_v1.json", "hotpot_dev_distractor_v1.json"),
            },
        ),
        QaSet("2wikimultihopqa", ("train", "dev")),
        QaSet(
            "musique",
            ("train", "dev"),
            {"train": ("musique_ans_v1.0_train.jsonl",), "dev": ("musique_ans_v1.0_dev.jsonl",)},
        ),
        QaSet("bamboogle", ("test",), {"test": ("Bamboogle*.csv",)}),
        QaSet("strategyqa", ("train",), {"train": ("strategyqa_train.json",)}),
    )
}


@dataclass(frozen=True)
class QuestionFile:
    """A file of questions. `split` is the name of its split, and goes into the ids of rows that have none."""

    data_source: str
    split: str
    path: Path


def named_file(item: str) -> QuestionFile | None:
    """The source given as `NAME=FILE`; None for a text without `=`. Raises `DataError` for a bad name."""
    name, separator, path = item.partition("=")
    if not separator:
        return None
    if not _NAME.fullmatch(name):
        raise DataError(f"{name!r} cannot be the name of a set (in {item}): give NAME=FILE, NAME of letters and digits")
    file = Path(path).expanduser()
    return QuestionFile(name, file.name.partition(".")[0], file)


def sources(names: str, wanted: str, folder: Path | None) -> list[QuestionFile]:
    """The sources in a comma-separated list of set names or `NAME=FILE`, in order. Without a folder, files on the hub.

    `wanted` is train or test. Raises `DataError`, which says which file to put where.
    """
    words = [word.strip() for word in names.split(",") if word.strip()]
    found = [word.partition("=")[0] for word in words]
    if not words or len(set(found)) != len(found):
        raise DataError(
            f"--data_sources {names!r} has to name some of {', '.join(SETS)}, other sets of FlashRAG, or files of your "
            f"own (NAME=FILE), each once, with commas between"
        )

    def of_set(name: str) -> QuestionFile:
        if name not in SETS and (not _NAME.fullmatch(name) or kind_of(Path(name)) in _KINDS or Path(name).is_file()):
            raise DataError(f"{name!r} is a file, or no name of a set; write NAME=FILE, such as mine={name}")
        return _from_hub(name, wanted) if folder is None else _from_folder(name, wanted, folder)

    return [named_file(word) or of_set(word) for word in words]


def sources_in(folder: Path, wanted: str) -> list[QuestionFile]:
    """One source for each set with questions in `folder`: first the known sets in their order, then the others by name.

    Raises `DataError` if there is none, or if a known set lacks the wanted file.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; it has to hold <set>/<split>.jsonl")
    names = {
        path.name
        for path in folder.iterdir()
        if path.is_dir() and any(_file_of(path.name, split, path) for split in ("test", "dev", "train"))
    }
    ordered = [*(name for name in SETS if name in names), *sorted(names - SETS.keys())]
    if not ordered:
        raise DataError(
            f"{folder} has no <set>/<split>.jsonl; sets are {', '.join(SETS)} or others, splits test, dev, train"
        )
    return [_from_folder(name, wanted, folder) for name in ordered]


def _from_folder(name: str, wanted: str, folder: Path) -> QuestionFile:
    """`<folder>/<name>/<split>.jsonl` or the original file beside it, each also as .gz."""
    if name not in SETS and not (folder / name).is_dir():
        there = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
        raise DataError(f"there is no set {name!r} in {folder}{_meant(name, [*SETS, *there])}; {_own(name)}")
    for split in _SPLITS[wanted]:
        path = _file_of(name, split, folder / name)
        if path is not None:
            return QuestionFile(name, split, path)
        # A published split that is not there is asked for, and not replaced by the next one.
        if split in _published(name):
            raise _missing(name, split, folder / name)
    files = ", ".join(f"{split}.jsonl" for split in _SPLITS[wanted])
    published = f", only {', '.join(_published(name))}" if _published(name) else ""
    raise DataError(f"{name} has no {wanted} split{published}: {folder / name} has none of {files}")


def _file_of(name: str, split: str, folder: Path) -> Path | None:
    patterns = (*(f"{split}{suffix}" for suffix in _SUFFIXES), *_originals(name, split))
    found = (path for pattern in patterns for end in ("", ".gz") for path in sorted(folder.glob(f"{pattern}{end}")))
    return next(found, None)


def _published(name: str) -> Sequence[str]:
    return SETS[name].splits if name in SETS else ()


def _originals(name: str, split: str) -> Sequence[str]:
    return SETS[name].originals.get(split, ()) if name in SETS else ()


def _missing(name: str, split: str, folder: Path) -> DataError:
    originals = _originals(name, split)
    or_original = f", or the original {' or '.join(originals)}" if originals else ""
    return DataError(
        f"{folder}: the {split} split is not there; place {split}.jsonl in this folder ({_url(name, split)})"
        f"{or_original}; a file of another split is given as {name}=FILE"
    )


def _from_hub(name: str, wanted: str) -> QuestionFile:
    # slow to import, and not needed with a folder
    from httpx2 import HTTPError
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    from search_r1.data.qa.hub_bar import HubBar

    # A set that we do not know may have any split: all are tried.
    splits = [split for split in _SPLITS[wanted] if split in _published(name)] or _SPLITS[wanted]
    for split in splits:
        file = f"{name}/{split}.jsonl"
        try:
            fetched = hf_hub_download(FLASHRAG_REPO, file, repo_type="dataset", tqdm_class=cast(Any, HubBar))
            return QuestionFile(name, split, Path(fetched))
        except RemoteEntryNotFoundError:
            continue
        except (OSError, HTTPError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"{file} of {FLASHRAG_REPO} could not be fetched ({reason}); without a network, fetch "
                f"{_url(name, split)} elsewhere, place it as DIR/{file} and pass --input_dir DIR"
            ) from error

    # The hub answered, and has none of them: the name is probably wrong.
    raise DataError(
        f"{FLASHRAG_REPO} has no {' or '.join(f'{name}/{split}.jsonl' for split in splits)}{_meant(name, SETS)}; "
        f"{_own(name)}"
    )


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _own(name: str) -> str:
    return f"a file of your own is given as {name}=FILE"


def _url(name: str, split: str) -> str:
    return f"https://huggingface.co/datasets/{FLASHRAG_REPO}/resolve/main/{name}/{split}.jsonl"


_LOOKED_AT = 100  # rows that may be broken before one that shows the format


@dataclass
class BadRows:
    """The policy for invalid rows: raise an error at the first, or list all of them and skip them."""

    skip: bool = False
    listed: list[str] = field(default_factory=list)

    def found(self, where: str, reason: str) -> None:
        """Register an invalid row. Raises `DataError` unless they are skipped."""
        if not self.skip:
            raise DataError(f"{where}: {reason}; correct the row, or leave such rows out by --skip_bad_rows")
        self.listed.append(f"{where}: {reason}")


def read_questions(path: Path, split: str, bad_rows: BadRows, sets_apart: bool = False) -> Iterator[QaRow]:
    """The questions of `path`, in file order. `split` goes into the ids of rows whose format has none.

    Raises `DataError` with file and line: for a file that cannot be read or has no known format, and, unless `bad_rows`
    skips them, for a row without a question or gold answers, with a wrong type, or with a repeated id. With
    `sets_apart`, each `data_source` of a prompt file has ids of its own.
    """
    records = read_records(path)
    first = list(islice(records, _LOOKED_AT))
    found = _format(path, first)
    line_of_id: dict[tuple[str, str], int] = {}
    # The index also counts bad rows: the ids made from it do not depend on which rows are left out.
    for index, record in enumerate(chain(first, records)):
        try:
            row = _question(record, found, split, index)
            key = str(record.value.get("data_source")) if sets_apart else "", row.id
            if key in line_of_id:
                unit = "row" if kind_of(path) == ".parquet" else "line"
                raise ValueError(f"the id {row.id!r} stands already in {unit} {line_of_id[key]}")
        except ValueError as error:
            bad_rows.found(place(path, record.line), str(error))
            continue
        line_of_id[key] = record.line
        yield row


def _format(path: Path, first: list[FileRow]) -> Format:
    if not first:
        raise DataError(f"{path} has no rows")
    found = format_of(record.value for record in first)
    if found is None:
        shown = next((record for record in first if not record.fault), first[0])
        what = shown.fault or f"a row with the keys {', '.join(map(str, shown.value))}"
        raise DataError(
            f"{place(path, shown.line)}: {what}; rows of your own need question and answer; known formats (with "
            f"the keys they need) are {known_formats()}"
        )
    return found


def _question(record: FileRow, found: Format, split: str, index: int) -> QaRow:
    """The question in a row of the format `found`. Raises `ValueError` with the reason if there is none."""
    if record.fault:
        raise ValueError(record.fault)
    missing = sorted(found.keys - record.value.keys())
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    return checked(found.read(record.value), split, index)
