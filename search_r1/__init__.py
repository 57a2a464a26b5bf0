"""The search agent: tag grammar, environment, retrieval service, rewards, data. It plugs into `verl` by dotted names."""
