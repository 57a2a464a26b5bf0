"""Pages that are never served: those that publish the questions and answers of benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from search_r1.errors import OnlineError
from text_file import read_text

# Where the question sets of this project are published.
BENCHMARK_PAGES = (
    "huggingface.co",
    "hf.co",
    "hf-mirror.com",
    "hotpotqa.github.io",
    "nlp.cs.washington.edu/triviaqa*",
    "ai.google.com/research/naturalquestions*",
    "kaggle.com/datasets*",
    "paperswithcode.com/dataset*",
    "github.com/hotpotqa*",
    "github.com/alab-nii/2wikimultihop*",
    "github.com/stonybrooknlp/musique*",
    "github.com/ofirpress/self-ask*",
    "github.com/alextmallen/adaptive-retrieval*",
    "github.com/google-research-datasets/natural-questions*",
)

_SCHEME = re.compile(r"https?:/{1,2}")


class DenyList:
    """Domains (`example.org`, including subdomains and all pages) and URL patterns (`example.org/data*`, `*.example`).

    A `*` matches any text; a pattern without a `/` applies to the host. Entries and addresses are compared in full, in
    lower case, without percent-escapes, scheme, user, port, `www.` and a trailing slash, and with the host as IDNA
    writes it. An address inside another one (an archived copy, a redirect) counts, too.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises `OnlineError` for an entry that is neither a domain nor a pattern."""
        plain = [_plain(entry) for entry in entries]
        self._domains = frozenset(entry for entry in plain if not {"/", "*"} & set(entry))
        self._hosts = _any_of(entry for entry in plain if "*" in entry and "/" not in entry)
        self._pages = _any_of(entry for entry in plain if "/" in entry)

    def denies(self, url: str) -> bool:
        """Whether a result at `url` must be left out. Anything that is not a URL is denied."""
        try:
            return any(self._denies(host, path) for host, path in _addresses(url))
        except ValueError:
            return True

    def _denies(self, host: str, path: str) -> bool:
        labels = host.split(".")
        if any(".".join(labels[start:]) in self._domains for start in range(len(labels))):
            return True
        return bool(self._hosts.fullmatch(host) or self._pages.fullmatch(host + path))


def read_deny_file(path: str) -> list[str]:
    """One entry per line; blank lines and text after a `#` are ignored. Raises `OnlineError`."""
    lines = read_text(Path(path), lambda reason: OnlineError(f"cannot read the deny list {reason}")).splitlines()
    return [entry for entry in (line.partition("#")[0].strip() for line in lines) if entry]


def _plain(entry: str) -> str:
    written = re.sub(r"^\w+://", "", entry.strip())
    try:
        if re.search(r"\s", written):
            raise ValueError("white space")
        host, path = _address(urlsplit(f"//{written}"))
    except ValueError as error:
        raise OnlineError(
            f"{entry!r} in the deny list is neither a domain nor a URL pattern such as example.org/data* ({error})"
        ) from error
    return host + path


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches what any of the patterns matches, and without patterns nothing."""
    texts = [".*".join(map(re.escape, pattern.split("*"))) for pattern in patterns]
    return re.compile("|".join(texts) or r"(?!)", re.DOTALL)


def _addresses(url: str) -> Iterator[tuple[str, str]]:
    """(host, path and query) of `url` and of every address written inside it. Raises `ValueError`."""
    yield _address(urlsplit(url.strip()))
    inner = _SCHEME.split(unquote(url).lower())[2:]
    yield from (_address(urlsplit("//" + text)) for text in inner if text)


def _address(parts: SplitResult) -> tuple[str, str]:
    if not parts.hostname:
        raise ValueError("no host")
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    query = f"?{parts.query}" if parts.query else ""
    return host.rstrip(".").removeprefix("www."), unquote(parts.path + query).lower().rstrip("/")
