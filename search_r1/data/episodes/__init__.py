"""Rows of a warm start from questions: a written policy plays episodes in the environment of a run."""
