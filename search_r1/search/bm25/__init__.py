"""BM25: our index, and Lucene's."""
