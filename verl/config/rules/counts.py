"""How many of what a step has, by the configuration alone."""

from __future__ import annotations

from verl.config.sections.schema import Config


def trajectories_per_step(config: Config) -> int:
    """Trajectories sampled in one RL step, all of them successful."""
    rollout = config.actor_rollout_ref.rollout
    return config.data.train_batch_size * (rollout.n_agent if config.do_search else rollout.n)


def num_training_steps(config: Config, num_prompts: int) -> int:
    """RL steps of a run over so many training prompts."""
    whole = max(1, num_prompts // config.data.train_batch_size) * config.trainer.total_epochs
    return config.trainer.total_training_steps or whole


def num_mini_batches(num_rows: int, size: int) -> int:
    """How many mini-batches come nearest to `size` rows each (half-way: the smaller ones); at least 1."""
    return max(1, (2 * num_rows + size) // (2 * size))


def largest_mini_batch(num_rows: int, size: int) -> int:
    """Rows of the largest mini-batch: they are even, so at most half as many again as `size`."""
    return -(-num_rows // num_mini_batches(num_rows, size))


def window_of(config: Config) -> int:
    """No sequence is longer, in tokens."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length
