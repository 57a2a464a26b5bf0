"""Reranking of passages with a cross-encoder."""
