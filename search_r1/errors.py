"""Typed errors of the retrieval service. Each message says what was wrong, where, and what to do."""

from program_end import FAILED, NEEDS_A_PERSON, ExpectedError

# In the `_meta` of an MCP tool's error: not the caller's doing. A trainer must not read it as the policy's.
INFRASTRUCTURE = "search-r1/infrastructure"


class SearchError(ExpectedError):
    """Base of every error the retrieval service and its client raise on purpose."""


class CorpusError(SearchError):
    """A file of passages or questions that is missing, empty or has a malformed row (the message says which line)."""

    exit_status = NEEDS_A_PERSON


class IndexMismatchError(SearchError):
    """An index that is missing, unreadable, or built from another corpus, encoder or analyzer."""

    exit_status = NEEDS_A_PERSON


class TargetTakenError(SearchError):
    """The target exists and was not written by an index builder of this service; it is never replaced."""

    exit_status = NEEDS_A_PERSON


class UnwritableError(SearchError):
    """An index cannot be written: its folder is a file, read-only or on a full disk."""


class EncoderError(SearchError):
    """An encoder or a cross-encoder that cannot be loaded, is not supported, or returns non-finite values."""

    exit_status = NEEDS_A_PERSON


class ServerError(SearchError):
    """The server cannot be started: a bad argument or a port in use."""

    exit_status = NEEDS_A_PERSON


class RetrieverError(SearchError):
    """Base of the client's errors: the query has no result, which is not the same as an empty result."""


class RetrieverAddressError(RetrieverError, ValueError):
    """The address of a server is not a valid URL."""

    exit_status = NEEDS_A_PERSON


class RetrieverUnavailable(RetrieverError):
    """No answer within the deadline, after retries."""


class RetrieverRejected(RetrieverError):
    """The server refused the request with HTTP `status` (a 4xx); a retry would not help."""

    status: int = 0


class QueryRefused(RetrieverError):
    """An engine of your own raises this for a query of a length or content that it does not take.

    It is the policy's doing: the policy reads that nothing was found.
    """


class RetrieverQueryFailed(RetrieverError):
    """The server works, but fails on this query every time."""


class RetrieverReplyError(RetrieverError):
    """The server answered 200 with something that is not a retrieval reply."""


class OnlineError(SearchError):
    """An online engine cannot be used: a wrong setting, no API key, an unreadable cache. Base of the ones below."""

    exit_status = NEEDS_A_PERSON


class OnlineUnavailable(OnlineError):
    """The online engine did not answer within the deadline or the allowed attempts; retry after `retry_after_s`."""

    exit_status = FAILED

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OnlineBusy(OnlineUnavailable):
    """The query was not sent, or not sent again: the rate limit would delay it beyond its client's timeout."""


class OnlineRejected(OnlineError):
    """The online engine refused the request with HTTP `status` (a wrong key, a used-up account); a retry would not
    help."""

    status: int = 0


class OnlineReplyError(OnlineError):
    """The online engine answered 200 with something other than search results."""

    exit_status = FAILED


class ReplayMissError(OnlineError):
    """The response cache is replayed and has no answer to this query."""


class SearchFailed(SearchError):
    """The retriever or the corpus failed on this query; the other queries of its batch are unaffected."""


class ServiceUnavailable(SearchError):
    """The queue is full or the server is stopping; retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
