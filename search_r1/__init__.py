"""The search agent: tag grammar, environment, retrieval service, rewards, data. `verl` loads it by dotted names."""
