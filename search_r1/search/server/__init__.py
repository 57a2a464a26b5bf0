"""The HTTP side of retrieval: app, routes, wire types, batches, cache."""
