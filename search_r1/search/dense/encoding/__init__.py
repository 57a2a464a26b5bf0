"""Text to vectors: encoders, their specification, pooling, precision."""
