"""What front ends and the owner say to each other: plain numbers and bytes in the byte order of the machine.

A message is a header (`HEADER`: bytes that follow, kind, number of the request) and a payload. A front end sends ASK,
WARM_UP or METRICS, and CANCEL for a request that nobody waits for any more; the owner answers DONE or FAILED.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from search_r1.search import errors
from search_r1.search.errors import SearchError, SearchFailed, ServiceUnavailable
from search_r1.search.source import Answer, EncodedHit

HEADER = struct.Struct("=QBQ")
ASK, WARM_UP, METRICS, CANCEL, DONE, FAILED = range(6)

_COUNTS = struct.Struct("=II")
_TEXT = ("utf-8", "surrogatepass")  # any string that Python holds arrives as it was


def pack_queries(queries: list[str], k: int) -> list[bytes]:
    """The payload of ASK, in pieces."""
    texts = [query.encode(*_TEXT) for query in queries]
    return [_COUNTS.pack(k, len(texts)), array("I", map(len, texts)).tobytes(), *texts]


def unpack_queries(payload: memoryview) -> tuple[list[str], int]:
    """The queries and k of `pack_queries`."""
    k, num_queries = _COUNTS.unpack_from(payload)
    sizes, start = _numbers("I", num_queries, payload, _COUNTS.size)
    return [str(text, *_TEXT) for text in _split(payload, start, sizes)], k


def pack_answers(answers: list[Answer]) -> list[bytes]:
    """The payload of DONE after ASK, in pieces; documents are not copied."""
    hits = [hit for answer in answers for hit in answer]
    documents = [hit.document for hit in hits]
    counts = array("I", map(len, answers)).tobytes()
    sizes = array("I", map(len, documents)).tobytes()
    scores = array("d", [hit.score for hit in hits]).tobytes()
    return [_COUNTS.pack(len(answers), len(hits)), counts, sizes, scores, *documents]


def unpack_answers(payload: memoryview) -> list[Answer]:
    """The answers of `pack_answers`."""
    num_answers, num_hits = _COUNTS.unpack_from(payload)
    counts, start = _numbers("I", num_answers, payload, _COUNTS.size)
    sizes, start = _numbers("I", num_hits, payload, start)
    scores, start = _numbers("d", num_hits, payload, start)
    documents = map(bytes, _split(payload, start, sizes))
    hits = [EncodedHit(document, score) for document, score in zip(documents, scores, strict=True)]
    return [tuple(hits[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]


def pack_error(error: SearchError) -> bytes:
    """The payload of FAILED: the nearest class of `errors`, the message, and seconds to wait if it has them."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return json.dumps([kind, str(error), getattr(error, "retry_after_s", None)]).encode()


def unpack_error(payload: memoryview) -> SearchError:
    """An error of the class that was packed."""
    kind, message, retry_after_s = json.loads(bytes(payload))
    if kind == ServiceUnavailable.__name__:
        return ServiceUnavailable(message, retry_after_s)
    known = getattr(errors, kind, SearchFailed)
    return known(message) if issubclass(known, SearchError) else SearchFailed(message)


def _numbers(code: str, count: int, payload: memoryview, start: int) -> tuple[Sequence[Any], int]:
    """`count` numbers of an array of type `code` from `start`, and where they end."""
    numbers = array(code)
    end = start + count * numbers.itemsize
    numbers.frombytes(payload[start:end])
    return numbers, end


def _split(payload: memoryview, start: int, sizes: Sequence[int]) -> list[memoryview]:
    return [payload[start:end] for start, end in pairwise(accumulate(sizes, initial=start))]
