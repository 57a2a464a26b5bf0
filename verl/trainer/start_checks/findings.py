"""All checks of the preflight, in the order in which they are shown."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from verl.config import Config
from verl.config.rules.config_warnings import config_warnings
from verl.config.rules.predicates import num_training_steps
from verl.data.files import check_files
from verl.engine.files.loading import ModelShape
from verl.errors import VerlError
from verl.planning.dry_run.device import room_for_sequences
from verl.planning.dry_run.run import dry_run
from verl.process.startup import usable_cores
from verl.process.storage import free_bytes
from verl.run.resuming import check_start, resumes_here, settings_since
from verl.trainer.start_checks import machine, prompts, resources
from verl.trainer.start_checks.command_line import Arguments
from verl.trainer.start_checks.finding import Finding
from verl.trainer.start_checks.inputs import Parts, check_parts
from verl.trainer.start_checks.models import Models, require_embeddings, require_savable
from verl.trainer.start_checks.resources import check_devices, check_network
from verl.trainer.start_checks.retrieval import REWARD_TODO, check_environment, try_reward


def all_findings(arguments: Arguments, models: Models) -> Iterator[Finding]:
    """The findings of all checks, the slowest last."""
    if not arguments.estimate_only:
        yield from findings(arguments, models)
    yield _memory(arguments, models.policy)


def _memory(arguments: Arguments, policy: ModelShape) -> Finding:
    """The finding of a dry run of what is trained, else the engine's room for a sequence."""
    if arguments.config.trainer.val_only:
        room, cache = room_for_sequences(arguments.config, policy, arguments.place)
        return Finding("ok" if room else "FAIL", "KV cache", cache)
    try:
        found = dry_run(arguments.config, arguments.place, policy)
    except VerlError as error:
        return Finding("FAIL", "memory", str(error))
    return Finding(found.level, "memory", f"{found.verdict}\n{found.report}")


def findings(arguments: Arguments, models: Models) -> Iterator[Finding]:
    """The findings of all checks except memory."""
    # What needs no file of the run's inputs.
    config = arguments.config
    yield Finding("ok", "config", f"for {arguments.entry_point}")
    yield from (Finding("warn", "config", warning) for warning in config_warnings(config))
    yield from _machine(arguments, models)
    yield from check_network(config, os.environ.get("RAY_ADDRESS"))

    # Prompt files, tokenizer and environment: all that follows reads them, so it ends here if they cannot be used.
    try:
        parts = check_parts(config)
    except VerlError as error:
        yield Finding("FAIL", "inputs", str(error))
        return
    yield Finding("ok", "inputs", "prompt files, tokenizer and environment can be used")
    tokenizer, environment, _ = parts
    yield from prompts.check_templates(config, environment)
    yield from prompts.check_tags(environment, tokenizer)
    try:
        loaded = prompts.load_prompts(config, tokenizer, environment)
        require_embeddings(models, tokenizer, environment, loaded)
    except VerlError as error:
        yield Finding("FAIL", "prompts", str(error))
        return

    # Each of these is tried as the run will do it.
    if not config.trainer.val_only:
        yield _tried_saving(config, parts)
    yield _tried_reward(config, parts, loaded)
    yield from prompts.check_lengths(config, loaded, models.policy.window)
    if config.retriever.placement == "per_node":
        yield Finding("ok", "environment", "the run starts its own retrievers, and checks them before the first step")
    else:
        yield check_environment(config, environment, loaded)
    first = loaded.train.all()[0].ids
    yield Finding("ok", "sample", f"position, id, loss mask, text\n{prompts.sample(config, tokenizer, first)}")


def _tried_reward(config: Config, parts: Parts, loaded: prompts.PromptSets) -> Finding:
    if config.reward.launch is not None:
        return Finding("ok", "reward", "the run starts a server for it, and checks that before the first step")
    try:
        tried = try_reward(parts.scorer, parts.tokenizer, loaded, parts.environment)
    except VerlError as error:
        return Finding("FAIL", "reward", str(error))
    if tried.suspicious is not None:
        return Finding("warn", "reward", f"{tried.found}; {tried.suspicious}", REWARD_TODO)
    return Finding("ok", "reward", tried.found)


def _tried_saving(config: Config, parts: Parts) -> Finding:
    try:
        require_savable(config, parts.tokenizer)
    except VerlError as error:
        return Finding("FAIL", "saving", str(error))
    return Finding("ok", "saving", "config and tokenizer of each trained model can be saved")


def _machine(arguments: Arguments, models: Models) -> Iterator[Finding]:
    config, folder = arguments.config, Path(arguments.config.trainer.default_local_dir)
    yield from machine.check_versions(machine.declared(), platform.python_version(), machine.installed())
    # The devices of another machine cannot be looked at from here.
    if not arguments.elsewhere:
        yield check_devices(config, os.environ.get("RAY_ADDRESS"), machine.num_gpus(), usable_cores())
    yield machine.check_open_files(machine.open_files_limit())
    yield resources.check_folder(folder)
    yield from _start(config)
    yield resources.check_all_checkpoints(config, models, num_steps(config), free_bytes(folder))
    # Buckets of weights go through this folder, unless engines and trained roles share GPUs.
    shared = Path("/dev/shm")
    if shared.is_dir():
        exported = arguments.place.on_gpu and config.trainer.layout == "colocated"
        bucket_mib = config.actor_rollout_ref.rollout.weight_sync.bucket_mib
        yield machine.check_shared_memory(models, exported, bucket_mib, shutil.disk_usage(shared).free)


def _start(config: Config) -> Iterator[Finding]:
    """Whether the run folder is free, and the settings that a resumed run changes."""
    try:
        check_start(config.trainer)
        changes = settings_since(config)
    except VerlError as error:
        yield Finding("FAIL", "start", str(error))
        return
    known = resumes_here(config.trainer) or config.trainer.resume_mode == "resume_path"
    yield Finding("ok", "start", "resumes an earlier run" if known else "a new run")
    for change in changes:
        yield Finding("ok" if change.harmless else "warn", "start", str(change))


def num_steps(config: Config) -> int | None:
    """The RL steps of the run; None while the prompt files cannot be read."""
    try:
        rows = config.data.train_data_num or check_files(config.data.train_files, config.data.prompt_key)
    except VerlError:
        return config.trainer.total_training_steps
    return num_training_steps(config, rows)
