"""A query that the client has not answered yet: its future, its deadline, its failures so far."""

from __future__ import annotations

import asyncio
import time

from search_r1.errors import RetrieverQueryFailed, RetrieverRejected, RetrieverReplyError, RetrieverUnavailable
from search_r1.http.error_replies import backoff_s, is_temporary, may_blame_query
from search_r1.search.client.reply import Passages, QueryFailure

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
_ENGINE_REFUSED = 424  # the status of a server whose online engine would not answer one of the queries
FAILED = 500  # the status of a server that cannot answer a query, or any
_MOST_FAILURES = 5  # of one query in a request of its own, while other queries are answered


class PendingQuery:
    """A query and the future that its callers await; `deadline` (monotonic seconds) is the latest of the callers'."""

    def __init__(self, query: str, loop: asyncio.AbstractEventLoop, num_answered: int) -> None:
        """`num_answered` is how many queries the client has had answered so far."""
        self.query = query
        self.deadline = 0.0
        self.answer: asyncio.Future[Passages] = loop.create_future()
        # no warning at exit about an error that no caller awaits any more
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self._num_answered_before = num_answered
        self._num_failures = self._num_pauses = 0

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def end(self, outcome: Passages | Exception) -> None:
        """Set the result or the exception of the future."""
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)

    def failed_alone(self, num_answered: int, message: str) -> None:
        """The server answered HTTP 500 to a request with this query alone.

        Raises `RetrieverQueryFailed` if that happened several times while other queries were answered: the server
        works, but not for this query.
        """
        self._num_failures += 1
        if self._num_failures >= _MOST_FAILURES and num_answered > self._num_answered_before:
            times = f"the retriever answers other queries, but failed on this one {self._num_failures} times"
            raise RetrieverQueryFailed(f"{times}; last: {message}")

    def pause_after(self, failure: QueryFailure, num_answered: int, retriever: str) -> float:
        """Seconds until the next attempt. Raises a `RetrieverError` if there is no further attempt."""
        message = f"retriever {retriever}: HTTP {failure.status}: {failure.detail}"
        if not is_temporary(failure.status):
            rejected = RetrieverRejected(f"{message}; the server rejects this query")
            rejected.status = failure.status
            raise rejected
        if failure.status == FAILED:
            self.failed_alone(num_answered, message)
        self._num_pauses += 1
        pause_s = max(failure.retry_after_s, backoff_s(self._num_pauses, FIRST_PAUSE_S, LONGEST_PAUSE_S))
        if pause_s >= self.left_s():
            raise RetrieverUnavailable(f"{message}; no time is left for a retry within retriever.deadline_s")
        return pause_s


def may_be_one_query(error: Exception) -> bool:
    """Whether one query may be to blame, so that the others of the batch can be answered."""
    refused = isinstance(error, RetrieverRejected) and (
        may_blame_query(error.status) or error.status == _ENGINE_REFUSED
    )
    return refused or isinstance(error, RetrieverReplyError | RetrieverQueryFailed)
