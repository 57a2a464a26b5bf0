"""Corpus, indexes and question sets from the Hugging Face hub, verified and made ready to use."""
