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

from search_r1 import errors
from search_r1.errors import SearchError, SearchFailed
from search_r1.search.server.source_interface import EncodedHit, Outcome

HEADER = struct.Struct("=QBQ")
ASK, WARM_UP, METRICS, CANCEL, DONE, FAILED = range(6)

_QUESTION = struct.Struct("=dII")
_COUNTS = struct.Struct("=III")
_TEXT = ("utf-8", "surrogatepass")  # any string that Python holds arrives as it was


def pack_queries(queries: list[str], k: int, wait_s: float) -> list[bytes]:
    """The payload of ASK, in pieces."""
    texts = [query.encode(*_TEXT) for query in queries]
    return [_QUESTION.pack(wait_s, k, len(texts)), array("I", map(len, texts)).tobytes(), *texts]


def unpack_queries(payload: memoryview) -> tuple[list[str], int, float]:
    """The arguments of `pack_queries`."""
    wait_s, k, num_queries = _QUESTION.unpack_from(payload)
    sizes, start = _numbers("I", num_queries, payload, _QUESTION.size)
    return [str(text, *_TEXT) for text in _split(payload, start, sizes)], k, wait_s


def pack_outcomes(outcomes: list[Outcome]) -> list[bytes]:
    """The payload of DONE after ASK, in pieces; documents are not copied. Errors follow the answers."""
    errors = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, SearchError)}
    answers = [() if isinstance(outcome, SearchError) else outcome for outcome in outcomes]
    hits = [hit for answer in answers for hit in answer]
    documents = [hit.document for hit in hits]
    packed = [pack_error(error) for error in errors.values()]
    return [
        _COUNTS.pack(len(answers), len(hits), len(errors)),
        array("I", map(len, answers)).tobytes(),
        array("d", [hit.score for hit in hits]).tobytes(),
        array("I", errors).tobytes(),
        array("I", map(len, documents + packed)).tobytes(),
        *documents,
        *packed,
    ]


def unpack_outcomes(payload: memoryview) -> list[Outcome]:
    """The outcomes of `pack_outcomes`."""
    num_answers, num_hits, num_errors = _COUNTS.unpack_from(payload)
    counts, start = _numbers("I", num_answers, payload, _COUNTS.size)
    scores, start = _numbers("d", num_hits, payload, start)
    failed, start = _numbers("I", num_errors, payload, start)
    sizes, start = _numbers("I", num_hits + num_errors, payload, start)
    texts = _split(payload, start, sizes)
    hits = [EncodedHit(bytes(document), score) for document, score in zip(texts[:num_hits], scores, strict=True)]
    outcomes: list[Outcome] = [tuple(hits[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
    for number, error in zip(failed, texts[num_hits:], strict=True):
        outcomes[number] = unpack_error(error)
    return outcomes


def pack_error(error: SearchError) -> bytes:
    """The payload of FAILED: the nearest class of `errors`, the message, and seconds to wait if it has them."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return json.dumps([kind, str(error), getattr(error, "retry_after_s", None)]).encode()


def unpack_error(payload: memoryview) -> SearchError:
    """An error of the class that was packed."""
    kind, message, retry_after_s = json.loads(bytes(payload))
    known = getattr(errors, kind, SearchFailed)
    told = () if retry_after_s is None else (retry_after_s,)
    return known(message, *told) if issubclass(known, SearchError) else SearchFailed(message)


def _numbers(code: str, count: int, payload: memoryview, start: int) -> tuple[Sequence[Any], int]:
    """`count` numbers of an array of type `code` from `start`, and where they end."""
    numbers = array(code)
    end = start + count * numbers.itemsize
    numbers.frombytes(payload[start:end])
    return numbers, end


def _split(payload: memoryview, start: int, sizes: Sequence[int]) -> list[memoryview]:
    return [payload[start:end] for start, end in pairwise(accumulate(sizes, initial=start))]
