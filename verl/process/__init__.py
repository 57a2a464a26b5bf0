"""What any process of a run needs: progress of its start, files, threads, signals, memory, loading by name."""
