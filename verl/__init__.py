"""The RL engine: trajectories, algorithms, sharded models, rollouts, the training loop. It knows nothing of search."""
