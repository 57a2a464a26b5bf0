"""Reranking of passages by a cross-encoder."""
