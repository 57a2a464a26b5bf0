"""Keys of other programs: those of verl, Search-R1 and TRL that have another name here, and Hydra's own settings."""

from __future__ import annotations

from collections.abc import Iterable

from verl.config.sections.fields import leaves, nearest
from verl.errors import ConfigError

FOLDER = "trainer.default_local_dir"
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
STEPS = "in RL steps: sample, score, update"
FSDP = "models are sharded with FSDP2 only"
CLUSTER = "Ray is started on this machine, or RAY_ADDRESS names the cluster to use"
MICRO_BATCH = "which counts the trajectories of all workers together"
REWARD = "the dotted name of a function or class"
TOOL_TURNS = "the number of turns that may use a tool; a last turn without tools follows"
ALL_TURNS = "one less: it counts the turns that may use a tool; a last turn without tools follows"

FSDP_KEYS = {
    "model_dtype": "weights are always kept in float32",
    "mixed_precision.buffer_dtype": "FSDP2 leaves buffers as they are",
    "wrap_policy.transformer_layer_cls_to_wrap": "the decoder layers of any model are found and sharded one by one",
}

# Foreign key: ours, and how it differs if it does.
RENAMED = {
    # verl
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": (f"{ACTOR}.ppo_micro_batch_size", MICRO_BATCH),
    f"{REF}.log_prob_micro_batch_size_per_gpu": (f"{REF}.log_prob_micro_batch_size", MICRO_BATCH),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": (f"{ROLLOUT}.log_prob_micro_batch_size", MICRO_BATCH),
    "critic.ppo_micro_batch_size_per_gpu": ("critic.ppo_micro_batch_size", MICRO_BATCH),
    "critic.forward_micro_batch_size_per_gpu": ("critic.forward_micro_batch_size", MICRO_BATCH),
    f"{ACTOR}.policy_loss.loss_mode": (f"{ACTOR}.policy_loss", "ppo, gspo, cispo or reinforce"),
    f"{ACTOR}.optim.lr_warmup_steps": (f"{ACTOR}.optim.lr_warmup_steps_ratio", "a fraction of all steps"),
    f"{ACTOR}.optim.lr_scheduler_type": (f"{ACTOR}.optim.warmup_style", ""),
    f"{ROLLOUT}.max_model_len": ("data.max_prompt_length", "the context window is this + data.max_response_length"),
    f"{ROLLOUT}.seed": ("trainer.seed", "from which each request's seed is derived"),
    f"{ROLLOUT}.multi_turn.enable": ("do_search", "false: one turn"),
    f"{ROLLOUT}.multi_turn.max_turns": ("max_turns", ALL_TURNS),
    f"{ROLLOUT}.multi_turn.max_user_turns": ("max_turns", TOOL_TURNS),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": ("max_turns", ALL_TURNS),
    f"{ROLLOUT}.multi_turn.max_tool_response_length": ("data.max_obs_length", "in tokens, not characters"),
    f"{ROLLOUT}.multi_turn.tool_config_path": ("agent.environment", "the dotted name of a class"),
    f"{ROLLOUT}.multi_turn.interaction_config_path": ("agent.environment", "the dotted name of a class"),
    f"{ROLLOUT}.agent.agent_loop_config_path": ("agent.environment", "the dotted name of a class"),
    "custom_reward_function.path": ("reward.function", REWARD),
    "custom_reward_function.name": ("reward.function", REWARD),
    "custom_reward_function.reward_kwargs": ("reward.kwargs", ""),
    "reward_model.reward_manager": ("reward.function", REWARD),
    "reward_model.reward_kwargs": ("reward.kwargs", ""),
    "data.shuffle": ("data.shuffle_train_dataloader", ""),
    "data.train_max_samples": ("data.train_data_num", ""),
    "data.val_max_samples": ("data.val_data_num", ""),
    "data.seed": ("trainer.seed", ""),
    "trainer.rollout_data_dir": ("trainer.save_trajectories", "they are written to the run's folder"),
    "trainer.validation_data_dir": ("trainer.save_trajectories", "they are written to the run's folder"),
    "trainer.log_val_generations": ("trainer.save_trajectories", "they are written to the run's folder"),
    "trainer.max_actor_ckpt_to_keep": ("trainer.max_ckpt_to_keep", "for all roles"),
    "trainer.max_critic_ckpt_to_keep": ("trainer.max_ckpt_to_keep", "for all roles"),
    # TRL
    "num_generations": (f"{ROLLOUT}.n_agent", ""),
    "learning_rate": (f"{ACTOR}.optim.lr", ""),
    "weight_decay": (f"{ACTOR}.optim.weight_decay", ""),
    "warmup_ratio": (f"{ACTOR}.optim.lr_warmup_steps_ratio", ""),
    "lr_scheduler_type": (f"{ACTOR}.optim.warmup_style", ""),
    "max_grad_norm": (f"{ACTOR}.grad_clip", ""),
    "beta": (f"{ACTOR}.kl_loss_coef", f"with {ACTOR}.use_kl_loss=true"),
    "epsilon": (f"{ACTOR}.clip_ratio", ""),
    "epsilon_high": (f"{ACTOR}.clip_ratio_high", ""),
    "delta": (f"{ACTOR}.clip_ratio_c", ""),
    "loss_type": (
        f"{ACTOR}.loss_agg_mode",
        "dapo: token-mean, grpo: seq-mean-token-mean, dr_grpo: seq-mean-token-sum-norm",
    ),
    "importance_sampling_level": (f"{ACTOR}.policy_loss", "token: ppo, sequence: gspo"),
    "num_iterations": (f"{ACTOR}.ppo_epochs", ""),
    "scale_rewards": (
        "algorithm.norm_adv_by_std_in_grpo",
        "group: true, none: false, batch: false with algorithm.norm_adv_by_batch_std=true",
    ),
    "mask_truncated_completions": ("algorithm.filter_overlong", ""),
    "sync_ref_model": ("algorithm.ref_policy_ema_tau", "1 keeps the reference policy fixed"),
    "ref_model_mixup_alpha": ("algorithm.ref_policy_ema_tau", "1 - alpha: the weight of the old reference policy"),
    "ref_model_sync_steps": ("algorithm.ref_policy_ema_update_period", STEPS),
    "per_device_train_batch_size": (f"{ACTOR}.ppo_micro_batch_size", MICRO_BATCH),
    "gradient_accumulation_steps": (f"{ACTOR}.ppo_mini_batch_size", "the number of trajectories per optimizer step"),
    "gradient_checkpointing": ("actor_rollout_ref.model.enable_gradient_checkpointing", ""),
    "model_name_or_path": ("actor_rollout_ref.model.path", ""),
    "max_prompt_length": ("data.max_start_length", "the prompt alone; data.max_prompt_length counts the turns too"),
    "max_completion_length": ("data.max_response_length", "of one turn"),
    "max_steps": ("trainer.total_training_steps", STEPS),
    "num_train_epochs": ("trainer.total_epochs", ""),
    "output_dir": ("trainer.default_local_dir", ""),
    "save_steps": ("trainer.save_freq", STEPS),
    "eval_steps": ("trainer.test_freq", STEPS),
    "report_to": ("trainer.logger", "a list such as [console,wandb]"),
    "run_name": ("trainer.experiment_name", ""),
    "reward_funcs": ("reward.function", REWARD),
    "reward_weights": ("reward.kwargs", "of search_r1.rewards.composite.CompositeReward, as {weights: ...}"),
    "vllm_gpu_memory_utilization": (f"{ROLLOUT}.gpu_memory_utilization", ""),
    "vllm_tensor_parallel_size": (f"{ROLLOUT}.tensor_model_parallel_size", ""),
}

# Foreign key, or all keys below it: why it is not there.
UNSUPPORTED = {
    f"{ACTOR}.megatron": FSDP,
    f"{REF}.megatron": FSDP,
    "critic.megatron": FSDP,
    f"{ACTOR}.use_torch_compile": "nothing is compiled in training",
    f"{ACTOR}.checkpoint": "a checkpoint always holds model, optimizer and random state",
    f"{ROLLOUT}.mode": "sampling is always asynchronous, each episode on its own",
    f"{ROLLOUT}.val_kwargs.n": "each validation prompt is answered once",
    f"{ROLLOUT}.agent.num_workers": f"each engine runs its own episodes, {ROLLOUT}.max_concurrent at once",
    f"{ROLLOUT}.enable_chunked_prefill": "it is on for GPUs and off for CPUs",
    f"{ROLLOUT}.engine_kwargs": "the engine's settings are those below actor_rollout_ref.rollout",
    "data.truncation": "a prompt is never cut; data.filter_overlong_prompts=true drops those that are too long",
    "data.gen_batch_size": "each round of sampling draws data.train_batch_size prompts",
    "data.image_key": "prompts are text",
    "data.return_full_prompt": "the trajectory files (trainer.save_trajectories=true) always hold the prompt",
    "trainer.balance_batch": "rows are always balanced over the workers",
    "trainer.ray_wait_register_center_timeout": "trainer.step_timeout_s limits every wait",
    "ray_init": CLUSTER,
    "ray_kwargs": CLUSTER,
    "global_profiler": "the time of each phase is in metrics.jsonl (timing_s/*)",
    "use_vllm": "vLLM always samples",
    "bf16": "it is the default on GPUs (actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype)",
    # Search-R1: optional keys below each model's fsdp_config
    **{
        f"{section}.{key}": reason
        for section in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config")
        for key, reason in FSDP_KEYS.items()
    },
}


# Hydra's own settings: what a program here does instead.
HYDRA = {
    "hydra.job.name": "trainer.experiment_name names a run",
    "hydra.job.chdir": "a program stays in the folder that it was started in",
    "hydra.output_subdir": "config.yaml is written to the run folder itself",
    "hydra.searchpath": "--config-dir DIR names a folder with YAML files",
    "hydra.sweep.subdir": "each run of a sweep has a folder that is named after its values",
    "hydra.verbose": "VERL_WORKER_LOGS=1 in the environment shows what all processes log",
    "hydra.mode": "-m runs a sweep",
    "hydra.launcher": "the runs of a sweep are started one after the other",
    "hydra.sweeper": "a sweep (-m) runs every combination of the values",
}
RUN_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
AS_IT_IS = ("hydra.job.chdir=false", "hydra.output_subdir=null")


def of_hydra(overrides: Iterable[str]) -> list[str]:
    """The overrides, Hydra's own settings replaced: its folder of a run or a sweep is trainer.default_local_dir.

    Raises ConfigError for those that mean nothing here, with what does instead, and for two names of the run folder.
    """
    found, folders = [], []
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        if not key.startswith(("hydra.", "hydra/")):
            found.append(text)
            if key == FOLDER:
                folders.append(key)
        elif key in RUN_FOLDERS:
            found.append(f"{FOLDER}={value}")
            folders.append(key)
        elif f"{key}={value.lower()}" not in AS_IT_IS:
            # The advice is that of the known setting which this one is, or which it is a part of.
            above = next((known for known in HYDRA if f"{key}.".replace("/", ".").startswith(f"{known}.")), None)
            instead = HYDRA.get(above or "", f"a run's configuration and results are in {FOLDER}")
            raise ConfigError(f"'{key}' is a setting of Hydra's own, which is not used here: {instead}")
    if len(set(folders)) > 1:
        raise ConfigError(
            f"{' and '.join(dict.fromkeys(folders))} both name the run folder, in which configuration, metrics and "
            "checkpoints of a run are together: give one of them"
        )
    return found


def unknown_key(cls: type, path: str) -> str:
    """The message for a key that the schema `cls` does not have."""
    return f"unknown key '{path}': {_hint(cls, path)}"


def _hint(cls: type, path: str) -> str:
    ours, how = RENAMED.get(path, ("", ""))
    if ours in leaves(cls):
        return f"here it is '{ours}'" + (f", {how}" if how else "")
    parts = path.split(".") if f"{ACTOR}.strategy" in leaves(cls) else []  # the reasons are those of an RL run
    for above in (".".join(parts[:n]) for n in range(len(parts), 0, -1)):
        if above in UNSUPPORTED:
            return f"not supported, because {UNSUPPORTED[above]}"
    guess = nearest(cls, path)
    return f"did you mean '{guess}'?" if guess else "--help lists all keys."
