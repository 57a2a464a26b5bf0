"""What watches a run's health: metrics of collapse, the limits, and the way back to a good checkpoint."""
