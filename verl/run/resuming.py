"""Which saved state a run resumes from, what happens to an earlier run in its folder, and which settings differ.

`python -m verl.run.resuming key=value ...` says whether a run of these settings may start in its folder.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import yaml

from program_end import exit_status
from verl.config import Config, load_config_from_argv
from verl.config.sections.trainer import Overwrite, ResumeMode, TrainerConfig
from verl.data.prompts import PromptSource
from verl.errors import CheckpointError, ConfigError
from verl.run import saved_state
from verl.run.run_folder import archive, archive_after, archive_checkpoints_after, check_new_run, check_not_in_use
from verl.tracking.changed_settings import Change, changed_settings
from verl.tracking.prometheus_backend import check_metrics_port
from verl.tracking.tracker import CONFIG_FILE, settings_text

log = logging.getLogger(__name__)


class ResumeSettings(Protocol):
    """What runs of every kind have in `trainer`."""

    default_local_dir: str
    overwrite: Overwrite
    resume_mode: ResumeMode
    resume_from_path: str | None


def state_to_resume(trainer: ResumeSettings) -> Path | None:
    """A verified folder, or None for a new run. What `auto` skips is logged with the reason.

    Raises CheckpointError when the named one cannot be used, and when `auto` finds only damaged states: a new run in
    the same folder would hide the old one.
    """
    if trainer.resume_mode == "resume_path":
        path = named_state(trainer)
        saved_state.verify(path)
        return path
    if trainer.resume_mode != "auto":
        return None
    run_dir = Path(trainer.default_local_dir)
    found, skipped = saved_state.newest(run_dir)
    for reason in skipped:
        log.warning("resume: skipped a checkpoint that cannot be used: %s", reason)
    if found is None and skipped:
        raise CheckpointError(
            f"no state in {run_dir / saved_state.FOLDER} can be used (the newest: {skipped[0]}); start a new run "
            "with trainer.resume_mode=disable and trainer.overwrite=archive or another trainer.default_local_dir"
        )
    return found


def check_start(trainer: TrainerConfig) -> None:
    """Raise ConfigError when another run uses the folder, or it holds one that is neither resumed nor archived, or when
    the port for metrics is in use. Fast.

    Raises CheckpointError for a state that is not there.
    """
    check_folder(trainer)
    check_metrics_port(trainer.metrics_port, trainer.metrics_host)


def check_folder(trainer: ResumeSettings) -> None:
    """The part of `check_start` that is about the folder."""
    check_not_in_use(Path(trainer.default_local_dir))
    _check_earlier_run(trainer)


def _check_earlier_run(trainer: ResumeSettings) -> None:
    run_dir = Path(trainer.default_local_dir)
    if resumes_here(trainer):
        if trainer.overwrite == "archive":
            raise ConfigError(
                "trainer.overwrite=archive would move away the checkpoint in trainer.resume_from_path: leave it out"
            )
    elif trainer.resume_mode != "auto":
        check_new_run(run_dir, trainer.overwrite, resumable=any(saved_state.saved(run_dir)))


def prepare_folder(trainer: ResumeSettings, state: Path | None = None) -> None:
    """Archive files that would mix with this run's; this run must have the folder's lock.

    `state`: the one that is resumed, which `auto` had to look for. Raises as `check_start` does, and StorageError.
    """
    _check_earlier_run(trainer)
    run_dir = Path(trainer.default_local_dir)
    if not resumes_here(trainer):
        if target := archive(run_dir):
            log.warning("the run folder held a run without a checkpoint to resume from; it was moved to %s", target)
    elif trainer.resume_mode == "resume_path":
        step = saved_state.step_of(named_state(trainer))
        if target := archive_after(run_dir, step):
            log.warning("what the run saved after step %d was moved to %s", step, target)
    elif state is not None and (target := archive_checkpoints_after(run_dir, saved_state.step_of(state))):
        log.warning("checkpoints after step %d, which is resumed, were moved to %s", saved_state.step_of(state), target)


def settings_since(config: Config) -> list[Change]:
    """The settings that differ from the resumed run's, which are in its folder's config.yaml."""
    trainer = config.trainer
    run_dir = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path":
        run_dir = named_state(trainer).parents[1]
    elif not resumes_here(trainer):
        return []
    return settings_in(run_dir, config)


def settings_in(run_dir: Path, config: Any) -> list[Change]:
    """The settings of `config`, of any schema, that differ from those in the folder's config.yaml, if there is one."""
    if not (run_dir / CONFIG_FILE).is_file():
        return []
    saved = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    return changed_settings(saved, yaml.safe_load(settings_text(asdict(config))))


def sources_since(trainer: TrainerConfig, prompts: PromptSource, sources: Mapping[str, str]) -> list[str]:
    """The sources (`Inputs.sources`) that differ from those that the resumed run has read, in words.

    Raises DataError if its training prompts are others. States saved before this was recorded are trusted.
    """
    # Which state is resumed is only known after its verification; here the newest one stands for it.
    if trainer.resume_mode == "resume_path":
        state: Path | None = named_state(trainer)
    else:
        state = max(saved_state.saved(Path(trainer.default_local_dir)), key=saved_state.step_of, default=None)
        state = state if trainer.resume_mode == "auto" else None
    if state is None:
        return []
    try:
        progress = saved_state.read_progress(state)
    except (OSError, ValueError):
        return []  # its verification, which comes later, says what is wrong
    prompts.check_state(progress.get("prompts", {}))
    before = progress.get("sources")
    if before is None:
        return [f"{state} does not say which prompts and index it was trained with, so they cannot be compared"]
    return [
        f"{name}: {before[name]} -> {now} (scores before and after it cannot be compared)"
        for name, now in sources.items()
        if before.get(name, now) != now
    ]


def resumes_here(trainer: ResumeSettings) -> bool:
    """Whether the run folder's metrics are those of this run."""
    if trainer.resume_mode == "disable":
        return False
    run_dir = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path":
        return named_state(trainer).parents[1].resolve() == run_dir.resolve()
    return any(saved_state.saved(run_dir))


def named_state(trainer: ResumeSettings) -> Path:
    """The state that trainer.resume_from_path names: by its own folder, by the actor's, as published, or as veRL does.

    Raises CheckpointError when it is not there, or is no state of a run.
    """
    path = Path(os.path.abspath(Path(trainer.resume_from_path or "").expanduser()))
    if not path.name.startswith(saved_state.PREFIX):
        path = path.resolve()  # a link to a state, as state/latest may be
    # For the folder of a model, or of the step in the run's folder: the state of the same step.
    run_dir = path.parents[1] if path.parent.name in ("actor", "critic", "ref", saved_state.FOLDER) else path.parent
    state = run_dir / saved_state.FOLDER / path.name
    path = state if state.is_dir() else path
    if not path.is_dir():
        others = [state.name for state in saved_state.saved(run_dir)]
        found = f"; {run_dir / saved_state.FOLDER} has {', '.join(others)}" if others else ""
        raise CheckpointError(f"trainer.resume_from_path: there is no checkpoint {path}{found}")
    if path.parent.name != saved_state.FOLDER or path not in saved_state.step_folders(path.parent):
        raise CheckpointError(
            f"trainer.resume_from_path: {path} is no checkpoint of a run: name its folder {saved_state.FOLDER}/"
            f"{saved_state.PREFIX}N"
        )
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Check whether a run of these settings may start in its folder; returns the exit status, as `exit_status` says."""

    def check() -> None:
        none_of_its_own = argparse.ArgumentParser(add_help=False)  # with which --help offers no sweep
        check_start(load_config_from_argv(sys.argv[1:] if argv is None else argv, own=none_of_its_own).trainer)

    return exit_status(check, when_interrupted="nothing was changed")


if __name__ == "__main__":
    sys.exit(main())
