"""One model on a mesh of devices: number formats, memory, shards, shared sequences."""
