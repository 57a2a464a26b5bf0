"""Which gold answers a corpus contains, and completing a corpus with the missing gold passages."""
