"""Passages of your own documents: text, Markdown, HTML and PDF files, and rows of CSV, JSON and Parquet."""
