"""The RL engine: trajectories, algorithms, sharded models, rollouts and the training loop. It knows nothing of search."""
