"""Corpus, indexes and question sets from the Hugging Face hub, checked and made ready to use."""
