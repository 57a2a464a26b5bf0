"""The files of models: reading, filling shards slice by slice, saving, adapters, the state to resume from."""
