"""Which gold answers a corpus holds, and a corpus with the missing gold passages."""
