"""The roles of a run as Ray actors."""
