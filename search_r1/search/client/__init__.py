"""The client of the retrieval server."""

from search_r1.search.client.page_client import PageClient
from search_r1.search.client.retrieval_client import RetrievalClient

__all__ = ["PageClient", "RetrievalClient"]
