"""Entry points and the loops they run."""
