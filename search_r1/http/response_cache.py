"""Answers of online engines: in one SQLite file, so that a test or a second run needs no engine, or in memory.

A key consists of the engine and the request without its API key. Stored is the body as received, with the API key
masked, so that an improved parser can read it again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cachetools import LRUCache

from search_r1.errors import OnlineError

_VERSION = 1
_WAIT_FOR_LOCK_S = 30.0
_TABLE = """
    CREATE TABLE IF NOT EXISTS answers (
        key TEXT PRIMARY KEY, request TEXT NOT NULL, body TEXT NOT NULL, is_empty INTEGER NOT NULL,
        stored_at REAL NOT NULL
    )
"""
_MAX_BYTES = 256 << 20
_ENTRY_BYTES = 300  # the digest, the tuple and their bookkeeping


class RequestKey(NamedTuple):
    """What makes two requests the same: `text` is canonical JSON, `digest` its SHA-256."""

    text: str
    digest: str


def request_key(provider: str, fields: dict[str, Any]) -> RequestKey:
    """The key of a request; `fields` must not hold the API key."""
    text = json.dumps([provider, fields], sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return RequestKey(text, hashlib.sha256(text.encode()).hexdigest())


class ResponseCache:
    """Used by one thread at a time; several processes may share the file. Every method raises `OnlineError`."""

    def __init__(
        self,
        path: str,
        keep_s: float,
        keep_empty_s: float,
        *,
        replay: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`replay` opens the file read-only and accepts answers of any age. Ages are in seconds."""
        self._path = path
        self._keep_s, self._keep_empty_s = keep_s, keep_empty_s
        self._replay = replay
        self._clock = clock
        if replay and not Path(path).is_file():
            raise OnlineError(f"the response cache {path} does not exist; make one with the cache mode record")
        try:
            self._file = self._open()
        except (sqlite3.Error, OSError) as error:
            raise self._unreadable(error) from error

    def get(self, key: RequestKey) -> str | None:
        """The stored body, or None if there is none that is recent enough."""
        try:
            row = self._file.execute(
                "SELECT body, is_empty, stored_at FROM answers WHERE key = ?", (key.digest,)
            ).fetchone()
        except sqlite3.Error as error:
            raise self._unreadable(error) from error
        if row is None:
            return None
        body, is_empty, stored_at = row
        age_s = self._clock() - stored_at
        return body if self._replay or age_s < (self._keep_empty_s if is_empty else self._keep_s) else None

    def put(self, key: RequestKey, body: str, is_empty: bool) -> None:
        """Store a body, replacing an earlier one; `is_empty`: it holds no results."""
        row = (key.digest, key.text, body, int(is_empty), self._clock())
        try:
            with self._file:
                self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def close(self) -> None:
        self._file.close()

    def _open(self) -> sqlite3.Connection:
        if not self._replay:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        uri = f"{Path(self._path).absolute().as_uri()}?mode={'ro' if self._replay else 'rwc'}"
        file = sqlite3.connect(uri, uri=True, timeout=_WAIT_FOR_LOCK_S, check_same_thread=False)
        try:
            self._check_tables(file)
        except sqlite3.Error:
            file.close()
            raise
        return file

    def _check_tables(self, file: sqlite3.Connection) -> None:
        version = file.execute("PRAGMA user_version").fetchone()[0]
        if version == _VERSION:
            return
        others = file.execute("SELECT count(*) FROM sqlite_master WHERE tbl_name <> 'answers'").fetchone()[0]
        if version or others or self._replay:
            raise sqlite3.DatabaseError("it is another kind of database")
        # in one transaction, because another process may do the same at this moment
        file.executescript(f"BEGIN IMMEDIATE; {_TABLE}; PRAGMA user_version = {_VERSION}; COMMIT")

    def _unreadable(self, error: Exception) -> OnlineError:
        return OnlineError(f"cannot use the response cache {self._path}: {error}; remove it or name another file")


class MemoryCache:
    """Keeps answers for as long as the process lives, so that nothing is paid twice by default.

    It is used like `ResponseCache`; the least recently used answers are evicted first.
    """

    def __init__(self, keep_s: float, keep_empty_s: float) -> None:
        self._keep_s, self._keep_empty_s = keep_s, keep_empty_s
        self._answers: LRUCache[str, tuple[str, float]] = LRUCache(_MAX_BYTES, getsizeof=_size)

    def get(self, key: RequestKey) -> str | None:
        """The stored body, or None if there is none that is recent enough."""
        body, expires = self._answers.get(key.digest, ("", 0.0))
        return body if time.monotonic() < expires else None

    def put(self, key: RequestKey, body: str, is_empty: bool) -> None:
        """Store a body, replacing an earlier one; `is_empty`: it holds no results."""
        entry = body, time.monotonic() + (self._keep_empty_s if is_empty else self._keep_s)
        if _size(entry) <= self._answers.maxsize:
            self._answers[key.digest] = entry

    def close(self) -> None:
        self._answers.clear()


def _size(entry: tuple[str, float]) -> int:
    return _ENTRY_BYTES + len(entry[0].encode("utf-8", "surrogatepass"))
