"""BM25: our own index, and Lucene's."""
