"""Retrieval: corpora, indexes, the retrieval server and its client."""
