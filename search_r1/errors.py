"""Typed errors of the retrieval service. Each message says what was wrong, where, and what to do."""


class SearchError(Exception):
    """Base of every error the retrieval service and its client raise on purpose."""


class CorpusError(SearchError):
    """A file of passages or questions that is missing, empty or has a malformed row (the message says which line)."""


class IndexMismatchError(SearchError):
    """An index that is missing, unreadable, or was built from another corpus, encoder or analyzer."""


class TargetTakenError(SearchError):
    """Where something is to be written lies what no builder of this service wrote; it is never replaced."""


class EncoderError(SearchError):
    """An encoder or a cross-encoder that cannot be loaded, is not supported, or gives non-finite values."""


class ServerError(SearchError):
    """The server cannot be started: a bad argument or a port in use."""


class RetrieverError(SearchError):
    """Base of what a client raises: the query has no result, which is not the same as an empty result."""


class RetrieverAddressError(RetrieverError, ValueError):
    """What was given as the address of a server is none."""


class RetrieverUnavailable(RetrieverError):
    """No answer within the deadline, after retries."""


class RetrieverRejected(RetrieverError):
    """The server refused the request with HTTP `status` (a 4xx); asking again would not help."""

    status: int = 0


class RetrieverQueryFailed(RetrieverError):
    """The server works, but fails at this query each time it is asked."""


class RetrieverReplyError(RetrieverError):
    """The server answered 200 with something that is not a retrieval reply."""


class OnlineError(SearchError):
    """An online engine cannot be used: a wrong setting, no API key, an unreadable cache. Base of the ones below."""


class OnlineUnavailable(OnlineError):
    """The online engine gave no answer within the deadline or the attempts allowed; it may after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OnlineBusy(OnlineUnavailable):
    """The query was not asked, or not again: its turn comes later than its client waits."""


class OnlineRejected(OnlineError):
    """The online engine refused the request (a wrong key, a used-up account); asking again would not help."""


class OnlineReplyError(OnlineError):
    """The online engine answered 200 with something else than search results."""


class ReplayMissError(OnlineError):
    """The response cache is replayed and has no answer to this query."""


class SearchFailed(SearchError):
    """A query that the retriever or the corpus could not answer; the others of its batch are not concerned."""


class ServiceUnavailable(SearchError):
    """The queue is full or the server stops; the request may come back after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
