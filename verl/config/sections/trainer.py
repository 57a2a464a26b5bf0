"""Settings of the run: length, devices, validation, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.sections.fields import count, section, setting

Logger = Literal["console", "wandb", "mlflow", "tensorboard", "jsonl"]
Layout = Literal["colocated", "split"]
Overwrite = Literal["never", "archive"]
ResumeMode = Literal["disable", "auto", "resume_path"]
AsyncRollout = Literal["off", "one_step_off", "bounded"]
GuardAction = Literal["off", "warn", "stop", "rollback"]


@dataclass
class CollapseGuardConfig:
    """The collapse guard. A limit of null is not watched; one that no step can cross is an error (docs/health.md)."""

    action: GuardAction = setting(
        "warn",
        "What the guard does: off (watches nothing), warn (logs each alarm), stop (ends the run at an alarm), or "
        "rollback (goes back to the last good checkpoint with half the learning rate).",
    )
    patience: int = count(5, "Number of steps in a row in which a condition must hold to raise an alarm.")
    max_rollbacks: int = setting(2, "action=rollback: number of rollbacks in a run; the next alarm ends it.", ge=0)
    dead_run_steps: int | None = count(
        20,
        "Number of steps in a row (instead of patience) in which nothing could be learned: all rewards were the "
        "same, no group of trajectories had two different rewards, all advantages were 0, or the gradient was 0.",
    )
    max_invalid_action_ratio: float | None = setting(
        0.9, "Maximum share of turns without a valid action (health/invalid_action_ratio).", ge=0, lt=1
    )
    max_repetition: float | None = setting(
        0.8, "Maximum share of repeated token 4-grams (health/repetition).", ge=0, lt=1
    )
    max_empty_think_ratio: float | None = setting(
        None, "Maximum share of turns without a thought (health/empty_think_ratio).", ge=0, lt=1
    )
    max_zero_variance_groups: float | None = setting(
        None, "Maximum share of groups whose rewards are all equal (health/zero_variance_groups).", ge=0, lt=1
    )
    min_reward: float | None = setting(
        None, "Minimum mean score of a step (critic/score/mean); a small positive number detects a run without reward."
    )
    max_score_drop: float | None = setting(
        None, "Maximum drop of critic/score/mean below its best moving average over 10 steps.", gt=0
    )
    min_entropy: float | None = setting(
        None, "Minimum mean entropy, in nats per token (health/entropy, else actor/entropy_loss).", gt=0
    )
    max_entropy: float | None = setting(
        None, "Maximum mean entropy, in nats per token (health/entropy, else actor/entropy_loss).", gt=0
    )
    max_kl: float | None = setting(
        None, "Maximum KL to the anchor, in nats per token (actor/kl_loss, or critic/kl of a KL in the reward).", gt=0
    )
    max_grad_norm: float | None = setting(None, "Maximum gradient norm before clipping (actor/grad_norm).", gt=0)
    max_mismatch: float | None = setting(
        None,
        "Maximum mean difference between the log-probs of rollout engine and trainer, in nats "
        "(health/mismatch/mean_abs). null: not watched, but on GPUs a first step above 0.1 ends the run.",
        gt=0,
    )


@dataclass
class TrainerConfig:
    """Settings of the run as a whole. One step is one RL step: sample, score, update."""

    total_epochs: int = count(30, "Number of passes over the training prompts.")
    total_training_steps: int | None = count(None, "Number of RL steps; null: as total_epochs gives.")
    project_name: str = setting("search_r1", "Project in the experiment trackers.")
    experiment_name: str = setting("default", "Name of the run in the experiment trackers.")
    logger: list[Logger] = setting(["console", "wandb"], "Where metrics go in addition to the run folder.")
    log_trajectories: int = setting(
        8,
        "Number of sample trajectories to log to W&B (as a table) and TensorBoard (as text), every "
        "log_trajectories_freq steps; 0: none.",
        ge=0,
    )
    log_trajectories_freq: int = count(10, "Steps between two such logs of sample trajectories.")
    metrics_port: int | None = setting(
        None, "Port for Prometheus: the metrics of the run are at /metrics; null: none.", ge=0, le=65535
    )
    metrics_host: str = setting(
        "127.0.0.1",
        "Address for metrics_port; 0.0.0.0 lets a Prometheus on another machine connect. There is no password.",
    )
    nnodes: int = count(1, "Number of nodes (machines).")
    min_nnodes: int | None = count(
        None,
        "Minimum number of nodes to start with if the cluster does not have all of nnodes within a minute; null: "
        "nnodes. Lets a run that lost a node resume on the others.",
    )
    n_gpus_per_node: int = count(8, "Workers per node: GPUs, or processes with device=cpu.")
    layout: Layout = setting(
        "colocated",
        "colocated: engines and trained roles take turns on all GPUs; split: some GPUs of each node sample "
        "(rollout_gpus_per_node) and the others train, or whole nodes sample (rollout.nnodes).",
    )
    rollout_gpus_per_node: int | None = count(
        None, "GPUs of each node that sample, with layout=split; must be null with colocated."
    )
    async_rollout: AsyncRollout = setting(
        "off",
        "off: each step is sampled, then trained; one_step_off: while a step is trained, the next one is sampled "
        "with the newest weights available when its sampling begins; bounded: sampling runs up to max_staleness "
        "steps ahead. Needs layout=split or device=cpu.",
    )
    max_staleness: int | None = count(
        None,
        "Maximum age of the weights that sample a token, in versions behind the weights that train on it. Required "
        "with async_rollout=bounded, else null: 1 with one_step_off, plus 1 with rollout.over_sample.",
    )
    save_freq: int = setting(-1, "Steps between two checkpoints; -1: only at the end.", ge=-1)
    test_freq: int = setting(-1, "Steps between two validations; -1: only before and after training.", ge=-1)
    critic_warmup: int = setting(0, "Number of steps at the start that train only the critic.", ge=0)
    default_hdfs_dir: str | None = setting(None, "Must be null: checkpoints are not copied to HDFS.")
    default_local_dir: str = setting(
        "checkpoints/search_r1/default",
        "The run folder: checkpoints, metrics, trajectories, report.",
        path=True,
        shown="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    )
    gather_state: bool = setting(
        False,
        "Allow each node to have its own default_local_dir, without a shared file system: ranks write their part of"
        " a checkpoint to their node's disk, it is copied to the driver's node, and copied back on resume.",
    )
    overwrite: Overwrite = setting(
        "never",
        "If the run folder holds an earlier run that this one does not resume: never refuses to start; archive "
        "first moves all of it to archive/DATE in the folder.",
    )
    val_before_train: bool = setting(True, "Validate before the first step.")
    val_only: bool = setting(False, "Validate once and stop.")
    eval_ref_policy_freq: int = setting(-1, "Steps between two validations of the anchor; -1: never.", ge=-1)
    resume_mode: ResumeMode = setting(
        "disable",
        "Whether to resume an earlier run: auto resumes from its newest intact checkpoint, if it has one; "
        "resume_path from resume_from_path.",
    )
    resume_from_path: str | None = setting(
        None,
        "For resume_mode=resume_path: .../state/global_step_N, or .../actor/global_step_N beside it, or "
        ".../global_step_N in the run's folder.",
        path=True,
    )
    max_ckpt_to_keep: int | None = count(
        None, "Number of checkpoints to keep, besides the one with the best validation; null: all."
    )
    del_local_ckpt_after_load: bool = setting(
        False, "Must be false: deleting the checkpoint after resuming from it is not available."
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where models run; auto: cuda if there is a GPU.")
    seed: int = setting(0, "Seed of everything random.", ge=0)
    deterministic: bool = setting(False, "Use only deterministic kernels; needs rollout.seed_per_request.")
    save_trajectories: bool = setting(True, "Write each step's trajectories to the run folder.")
    save_token_values: bool = setting(
        True,
        "Store each token's advantage, log-prob under the trainer and KL with the trajectories of a training step.",
    )
    save_timeline: bool = setting(
        True,
        "Write a timeline of each step (what driver, engines and ranks did when) to the run folder, for "
        "ui.perfetto.dev.",
    )
    step_timeout_s: float = setting(
        3600.0,
        "Maximum wait for a worker, in seconds: for its part of a phase, or for an engine to finish a trajectory.",
        gt=0,
    )
    sigterm_grace_s: float = setting(
        30.0,
        "Seconds from SIGTERM until the sender kills the run (30 for many schedulers). All but the last 20 are used to "
        "finish the step in hand and save it; without time for that, the run ends at once.",
        ge=0,
    )
    collapse_guard: CollapseGuardConfig = section(CollapseGuardConfig)
