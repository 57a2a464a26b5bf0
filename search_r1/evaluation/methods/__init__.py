"""Ways to answer a question that are compared under one harness: the search agent and its baselines."""
