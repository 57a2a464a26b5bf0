"""The search agent: tag grammar, environment, retrieval service, rewards, data. Plugs into `verl` by dotted names."""
