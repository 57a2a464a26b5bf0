"""Where a run's numbers and trajectories go: console, JSON lines, TensorBoard, W&B, Parquet, and the report."""
