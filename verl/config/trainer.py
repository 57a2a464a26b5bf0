"""Settings of the run: length, devices, validation, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.collapse_guard import CollapseGuardConfig
from verl.config.fields import section, setting

Logger = Literal["console", "wandb", "mlflow", "tensorboard", "jsonl"]
Layout = Literal["colocated", "split"]
Overwrite = Literal["never", "archive"]
AsyncRollout = Literal["off", "one_step_off", "bounded"]


@dataclass
class TrainerConfig:
    """The run. One step is one RL step: sample, score, update."""

    total_epochs: int = setting(30, "Passes over the training prompts.", ge=1)
    total_training_steps: int | None = setting(None, "RL steps; null: as many as total_epochs give.", ge=1)
    project_name: str = setting("search_r1", "Project in the experiment trackers.")
    experiment_name: str = setting("default", "Name of the run in the experiment trackers.")
    logger: list[Logger] = setting(["console", "wandb"], "Where metrics go besides the run folder.")
    log_trajectories: int = setting(
        8,
        "Trajectories that W&B (a table) and TensorBoard (texts) show, every log_trajectories_freq steps (0: none).",
        ge=0,
    )
    log_trajectories_freq: int = setting(10, "Steps between two such samples of trajectories.", ge=1)
    metrics_port: int | None = setting(
        None, "Port on which Prometheus finds the metrics of the run at /metrics; null: none.", ge=0, le=65535
    )
    metrics_host: str = setting(
        "127.0.0.1", "Address that metrics_port listens at; 0.0.0.0 for a Prometheus on another machine. No password."
    )
    nnodes: int = setting(1, "Machines.", ge=1)
    min_nnodes: int | None = setting(
        None,
        "Fewest machines to start on when the cluster has not all of nnodes within a minute; null: nnodes. A run that "
        "lost one and is restarted goes on with those that are left.",
        ge=1,
    )
    n_gpus_per_node: int = setting(8, "Workers per machine: GPUs, or processes with device=cpu.", ge=1)
    layout: Layout = setting(
        "colocated",
        "colocated: the engines and the trained roles take turns on all GPUs; split: of each node some GPUs sample "
        "(rollout_gpus_per_node) and the others train, or whole nodes sample (rollout.nnodes).",
    )
    rollout_gpus_per_node: int | None = setting(
        None, "GPUs of each node that sample, with layout=split; null with colocated.", ge=1
    )
    async_rollout: AsyncRollout = setting(
        "off",
        "off: a step is sampled, then trained; one_step_off: while a step is trained the next one is sampled, with the "
        "newest weights that were finished when its sampling began; bounded: up to max_staleness steps ahead. Needs "
        "layout=split, or device=cpu.",
    )
    max_staleness: int | None = setting(
        None,
        "How many versions older than those trained on a step the weights that sampled a token of it may be, at most. "
        "Needed with async_rollout=bounded; null otherwise: 1 with one_step_off, and 1 more with rollout.over_sample.",
        ge=1,
    )
    save_freq: int = setting(-1, "Steps between two checkpoints; -1: only at the end.", ge=-1)
    test_freq: int = setting(-1, "Steps between two validations; -1: only before and after training.", ge=-1)
    critic_warmup: int = setting(0, "Steps that train only the critic, at the start.", ge=0)
    default_hdfs_dir: str | None = setting(None, "Must be null: checkpoints are not copied to HDFS.")
    default_local_dir: str = setting(
        "checkpoints/search_r1/default",
        "The run folder: checkpoints, metrics, trajectories, report.",
        path=True,
        shown="checkpoints/${trainer.project_name}/${trainer.experiment_name}",
    )
    gather_state: bool = setting(
        False,
        "Whether nodes may have a default_local_dir of their own: what their ranks write of a state is on their disk, "
        "at the same path, until it is copied to the driver's node, and is copied back when the run resumes.",
    )
    overwrite: Overwrite = setting(
        "never",
        "If the run folder holds an earlier run that this one does not resume: never refuses to start, archive first "
        "moves everything of it to archive/DATE in the folder.",
    )
    val_before_train: bool = setting(True, "Validate before the first step.")
    val_only: bool = setting(False, "Validate once and stop.")
    eval_ref_policy_freq: int = setting(-1, "Steps between two validations of the anchor; -1: never.", ge=-1)
    resume_mode: Literal["disable", "auto", "resume_path"] = setting(
        "disable", "Whether to go on with an earlier run; auto: from its newest state that verifies, if it has one."
    )
    resume_from_path: str | None = setting(
        None, "For resume_mode=resume_path: .../state/global_step_N, or .../actor/global_step_N beside it.", path=True
    )
    max_ckpt_to_keep: int | None = setting(
        None, "Checkpoints that are kept, and the one of the best validation besides; null: all.", ge=1
    )
    del_local_ckpt_after_load: bool = setting(False, "Delete the checkpoint that was resumed from.")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where models run; auto: cuda when there is a GPU.")
    seed: int = setting(0, "Seed of everything random.", ge=0)
    deterministic: bool = setting(
        False, "Only kernels that give the same bits for the same input; needs rollout.seed_per_request."
    )
    save_trajectories: bool = setting(True, "Write each step's trajectories to the run folder.")
    save_token_values: bool = setting(
        True, "With the trajectories of a training step: each token's advantage, log-prob under the trainer and KL."
    )
    save_timeline: bool = setting(
        True, "Write what driver, engines and ranks did when, a file a step in the run folder, for ui.perfetto.dev."
    )
    step_timeout_s: float = setting(
        3600.0,
        "Longest wait for a worker, in seconds: for its part of a phase, or for an engine to end a trajectory.",
        gt=0,
    )
    collapse_guard: CollapseGuardConfig = section(CollapseGuardConfig)
