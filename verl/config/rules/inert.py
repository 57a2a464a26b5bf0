"""Published keys (or values of them) that have no effect here: setting one is an error that says what to use."""

from __future__ import annotations

from verl.config.sections.keys import leaves, value_at
from verl.config.sections.schema import Config

# Key: why it has no effect, and what to use instead. The default is the only value that may stand there.
INERT_KEYS = {
    "data.return_raw_input_ids": "token ids are never decoded and encoded again; the trajectory files have the ids",
    "data.return_raw_chat": "the trajectory files (trainer.save_trajectories=true) always have the prompt",
    "actor_rollout_ref.hybrid_engine": "trainer.layout decides whether the rollout engine shares the actor's devices",
    "actor_rollout_ref.rollout.do_sample": (
        "training always samples; for greedy or sampled validation set actor_rollout_ref.rollout.val_kwargs.do_sample"
    ),
    "algorithm.no_think_rl": "Search-R1's code refuses it too; the prompt (agent.template) decides whether to think",
    "algorithm.state_masking.start_state_marker": ("tokens are masked by who wrote them, not by markers in the text"),
    "algorithm.state_masking.end_state_marker": ("tokens are masked by who wrote them, not by markers in the text"),
    "trainer.default_hdfs_dir": "checkpoints are not copied to HDFS; set trainer.default_local_dir to a shared folder",
}

# Loaders of the vLLM adapters that the published code carried.
OLD_LOAD_FORMATS = ("dummy_dtensor", "dummy_hf", "dummy_megatron", "dtensor", "hf", "megatron")


def inert_problems(config: Config) -> list[str]:
    """One message for each inert key that was set."""
    known = leaves(Config)
    changed = ((key, value_at(config, key), known[key].default) for key in INERT_KEYS)
    problems = [
        f"{key}={value} has no effect here: {INERT_KEYS[key]}. Leave it at {'null' if default is None else default}."
        for key, value, default in changed
        if value != default
    ]
    load_format = config.actor_rollout_ref.rollout.load_format
    if load_format in OLD_LOAD_FORMATS:
        problems.append(
            f"actor_rollout_ref.rollout.load_format={load_format} names a loader that vLLM no longer has: "
            "use auto, or dummy to skip reading weights that the first sync replaces"
        )
    return problems
