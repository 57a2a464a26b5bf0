"""Methods of answering a question, compared under the same conditions: the search agent and its baselines."""
