"""`.venv/bin/python -m verl.trainer.sft key=value ...`: warm start on segments or conversations
(`verl.data.sft_rows`).

The first `data.lm_fraction` of the steps are language modelling on all tokens, the others train on policy segments
only. `trainer.n_gpus_per_node=2` trains with two workers on this machine; torchrun works as well.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from long_task import Progress
from program_end import exit_status
from verl.config.loading.command_line import is_sweep, load_from_argv
from verl.config.loading.run import load_sft_config
from verl.config.sections.schema import SftConfig
from verl.data.sft_rows import Batches, Row, held_out_batches, held_out_digest, read_rows
from verl.errors import CheckpointError, ConfigError, DataError, NumericalError
from verl.pretrained import load_tokenizer
from verl.process import startup
from verl.process.interrupts import heed_interrupts
from verl.process.ranks import RENDEZVOUS, is_rank, run_ranks
from verl.process.startup import leave
from verl.process.storage import append, whole_file, work_without_home
from verl.run import saved_state
from verl.run.last_checkpoint import OTHER_ROWS, held_out_losses
from verl.run.resuming import check_folder, prepare_folder, resumes_here, settings_in, state_to_resume
from verl.run.run_folder import archive_after, run_lock
from verl.run.saved_state import PREFIX, saving
from verl.tracking.jsonl_backend import FILE_NAME
from verl.tracking.tracker import CONFIG_FILE, settings_text

if TYPE_CHECKING:
    import torch

    from verl.data.conversations import ConversationRow

CONFIG_NAME = "sft"
PROGRAM = "verl.trainer.sft"
ROLE = "model"
"""The folder of a saved state that has the model and its optimizer."""
T = TypeVar("T")
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `exit_status` says."""
    startup.log_to_stderr()
    work_without_home()
    heed_interrupts()
    first_rank = int(os.environ.get("RANK", "0")) == 0
    if not first_rank:
        logging.getLogger("verl").setLevel(logging.WARNING)
    # Several values of a key are several runs.
    arguments = sys.argv[1:] if argv is None else argv
    if is_sweep(arguments, CONFIG_NAME):
        return exit_status(lambda: run_sweep(arguments), "the same command resumes the sweep")

    # Several ranks are processes that this one starts; each of them, or a single rank, trains.
    ranks_ended, run_dir = 0, None

    def warm_start() -> None:
        nonlocal ranks_ended, run_dir
        config = load_from_argv(SftConfig, load_sft_config, arguments, CONFIG_NAME)
        run_dir = Path(config.trainer.default_local_dir)
        if config.trainer.n_gpus_per_node > 1 and "RANK" not in os.environ:
            check_start(config)
            ranks_ended = run_ranks([sys.executable, "-m", PROGRAM, *arguments], config.trainer.n_gpus_per_node)
            return
        target = run(config)
        if first_rank:
            print(f"model: {target}")

    def what_is_left() -> str:
        return "" if is_rank() else "nothing was saved" if run_dir is None else saved_state.how_to_resume(run_dir)

    status = exit_status(warm_start, what_is_left)
    return status or ranks_ended


def run_sweep(arguments: Sequence[str]) -> None:
    """A warm start for every combination of the values that `-m` asks for."""
    from verl.trainer.sweep import sweep

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("-m starts processes of its own, so it does not go with torchrun: start each run by itself")
    print(f"table: {sweep(PROGRAM, SftConfig, arguments, CONFIG_NAME, load_sft_config)}")


def check_start(config: SftConfig) -> None:
    """Raise ConfigError when another run uses the folder, or it holds one that must be kept. Fast."""
    trainer = config.trainer
    check_folder(trainer)
    if config.data.val_files is None and (trainer.patience is not None or trainer.test_freq > 0):
        raise ConfigError(
            "trainer.patience and trainer.test_freq are about the held-out loss: set data.val_files, or leave them out"
        )
    if trainer.patience is not None and trainer.test_freq <= 0:
        raise ConfigError(
            f"trainer.patience={trainer.patience} has no effect with trainer.test_freq={trainer.test_freq}, which "
            "measures nothing during training: set trainer.test_freq=N, or leave trainer.patience out"
        )
    startup.tell("the config is valid")


def run(config: SftConfig) -> Path:
    """Train as one worker, save, and return the model's folder. Raises VerlError."""
    run_dir = Path(config.trainer.default_local_dir)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # For ranks, the process that started them has checked this. Those of torchrun would find the folder in use: by the
    # first one, or by one another's look.
    if rank == 0 and not is_rank():
        check_start(config)
    with startup.phase("reading the rows"):
        rows = read_rows(config.data.train_files)
        held_out = read_rows(config.data.val_files, "data.val_files") if config.data.val_files is not None else []

    # Imported late: what is wrong with the settings or the rows is told before these seconds pass.
    with startup.phase("importing torch"):
        import torch.distributed as dist

        from verl.engine.device.runtime import init_process_group, resolve_device
        from verl.trainer.start_checks.finding import require
        from verl.trainer.start_checks.resources import check_folder as check_disk

    require(check_disk(run_dir))

    device = resolve_device(config.trainer.device, int(os.environ.get("LOCAL_RANK", "0")))
    # The first rank holds the run folder's lock for all. A single rank meets itself in a file, which needs no port.
    with tempfile.TemporaryDirectory() as folder, run_lock(run_dir) if rank == 0 else nullcontext():
        meet = os.environ.get(RENDEZVOUS) or ("env://" if world_size > 1 else f"file://{folder}/store")
        init_process_group(rank, world_size, meet, device)
        try:
            return WarmStart(config, rows, held_out, device).train()
        finally:
            dist.destroy_process_group()


class WarmStart:
    """The steps, inside a process group: all ranks call all methods in the same order.

    Writes `metrics.jsonl`, models (`global_step_N`) and what a resumed run needs (`state/global_step_N`) into the run
    folder.
    """

    def __init__(
        self,
        config: SftConfig,
        rows: Sequence[Row | ConversationRow],
        held_out: Sequence[Row | ConversationRow],
        device: torch.device,
    ) -> None:
        with startup.phase(f"loading {config.model.path}"):
            from verl.engine.device.sharding import is_main_rank
            from verl.engine.sft_engine import SftEngine

            self.tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code, "model.path")
            self.engine = SftEngine(config, device)
        # What would otherwise fail at the first save, or at some later row, is tried now.
        self.engine.save_as_a_test(self.tokenizer, f"model.path={config.model.path}")
        self.main_rank = is_main_rank()
        startup.tell(f"tokenising {len(rows) + len(held_out)} rows")
        self.batches = Batches(config, self.tokenizer, rows, shown=self.main_rank)
        self.batches.check_ids(self.engine.num_embeddings)
        self.held_out = held_out_batches(config, self.tokenizer, held_out, self.engine.num_embeddings, self.main_rank)
        self.config, self.trainer = config, config.trainer
        self.run_dir = Path(config.trainer.default_local_dir)
        self.losses: dict[int, float] = {}  # held-out, by step
        self.saved: set[int] = set()  # models of this process

    def train(self) -> Path:
        """Returns the folder of the model with the lowest held-out loss; without held-out rows, of the last one."""
        start, num_steps = self._begin(), self.trainer.total_training_steps
        last = start if self._lost_patience() else num_steps
        if start < last:
            startup.tell(f"step {start + 1} of {num_steps}; one line every {self.trainer.log_freq} steps")
        if start == 0 and self.held_out:
            self._log(0, self._measured(0))
        with Progress("warm start", num_steps, unit="steps", shown=self.main_rank, lines=False) as progress:
            progress.reach(start)
            for step in range(start + 1, last + 1):
                phase, batch = self.batches.next(step - 1)
                metrics = self.engine.step(batch) | {"lm_phase": float(phase == "lm")}
                told = f"{phase} loss {metrics.get('loss', 0.0):.4f}"
                if self.held_out and (step == last or _is_due(step, self.trainer.test_freq)):
                    metrics |= self._measured(step)
                    told += f", held-out loss {metrics['val_loss']:.4f}"
                progress.update(note=told)
                self._log(step, metrics)
                if (
                    self.main_rank
                    and not progress.has_bar
                    and ("val_loss" in metrics or _is_due(step, self.trainer.log_freq))
                ):
                    log.info("step %d/%d %s, %s", step, num_steps, told, progress.pace())

                # A model is saved when it is the best, when it is due, and at the end.
                over = step == last or ("val_loss" in metrics and self._lost_patience())
                if over or _is_due(step, self.trainer.save_freq):
                    self._save(step)
                elif "val_loss" in metrics and step == self._best_step():
                    self._save_model(step)
                    self._tidy()
                if over:
                    return self._result(step)
        # No step was left. The model is in the resumed run's folder, which may be another one.
        if not self.losses and not self._from_main((self.run_dir / f"{PREFIX}{start}").is_dir):
            self._save(start)
        return self._result(start)

    def _begin(self) -> int:
        """Make the folder ready; returns the number of steps that were done by the run that this one resumes."""
        # What is resumed is checked first: a start that is refused leaves the folder as it is.
        state = self._from_main(lambda: state_to_resume(self.trainer))
        if state is not None:
            saved_state.require_roles(state, [ROLE])
            progress = saved_state.read_progress(state)
            if progress["rows"] != self.batches.digest:
                raise DataError(
                    f"data.train_files: these are not the rows that {state} was trained on, or they are tokenised "
                    "otherwise; resume with the same, or start a new run (trainer.resume_mode=disable)"
                )
            self._require_phases(state, progress)
            with startup.phase(f"resuming from {state}"):
                self.engine.load_state(state / ROLE)
                self.batches.skip(self.engine.num_steps_done)
        self.losses = self._from_main(lambda: self._prepare(state))
        return self.engine.num_steps_done

    def _require_phases(self, state: Path, progress: Mapping[str, Any]) -> None:
        """Raise ConfigError if the steps done would have been of other phases: their rows could not be told apart from
        those to come. A state that does not name its steps of phase lm is taken as it is.
        """
        num_lm_steps, done = self.batches.num_lm_steps, progress["step"]
        earlier, num_steps = progress.get("lm_steps", num_lm_steps), self.trainer.total_training_steps
        if min(earlier, done) != min(num_lm_steps, done):
            raise ConfigError(
                f"data.lm_fraction={self.config.data.lm_fraction:g} of trainer.total_training_steps={num_steps} are "
                f"{num_lm_steps} steps of phase lm, but {state} is of a run with {earlier}; set "
                f"data.lm_fraction={min(earlier / num_steps, 1.0):.6g}, or start a new run "
                "(trainer.resume_mode=disable)"
            )

    def _prepare(self, state: Path | None) -> dict[int, float]:
        """Make the folder ready for a run from `state`, on the main rank alone; returns the held-out losses so far."""
        if state is not None and resumes_here(self.trainer):
            for change in settings_in(self.run_dir, self.config):
                log.warning("setting that differs from the resumed run: %s", change)
            archive_after(self.run_dir, saved_state.step_of(state))
        prepare_folder(self.trainer)
        with whole_file(self.run_dir / CONFIG_FILE) as temporary:
            temporary.write_text(settings_text(asdict(self.config)), encoding="utf-8")
        losses = held_out_losses(self.run_dir)
        if state is None or not losses:
            return losses
        # A loss compares only with those of the same rows. A state that does not say which they were had these.
        rows = held_out_digest(self.held_out)
        if rows is not None and saved_state.read_progress(state).get("held_out", rows) == rows:
            return losses
        log.warning("the held-out rows are not those of the earlier steps, whose held-out losses no longer count")
        append(self.run_dir / FILE_NAME, _line(saved_state.step_of(state), {OTHER_ROWS: 1.0}))
        return {}

    def _from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns on the main rank, on all ranks."""
        import torch.distributed as dist

        made: list[Any] = [make() if self.main_rank else None]
        dist.broadcast_object_list(made)
        found: T = made[0]
        return found

    def _measured(self, step: int) -> dict[str, float]:
        """The held-out loss, in nats per token. Raises NumericalError for one that is not finite."""
        loss = self.engine.mean_loss(self.held_out)
        if not math.isfinite(loss):
            raise NumericalError(f"step {step}: the held-out loss is {loss}; lower optim.lr or trainer.grad_clip")
        if step:  # before the first step nothing is there that could be the best
            self.losses[step] = loss
        return {"val_loss": loss}

    def _best_step(self) -> int:
        return min(self.losses, key=lambda step: (self.losses[step], step))

    def _lost_patience(self) -> bool:
        """Whether the held-out loss has not fallen for too long."""
        if self.trainer.patience is None or not self.losses:
            return False
        best = self._best_step()
        return sum(step > best for step in self.losses) >= self.trainer.patience

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.main_rank:
            append(self.run_dir / FILE_NAME, _line(step, {f"sft/{name}": value for name, value in metrics.items()}))

    def _save(self, step: int) -> None:
        """Save the model, and what a run needs to go on from it."""
        self._save_model(step)
        if self.trainer.save_freq > 0:
            self._save_state(step)
        self._tidy(step)

    def _save_model(self, step: int) -> None:
        if step in self.saved:
            return
        target = self.run_dir / f"{PREFIX}{step}"
        with saving(target) if self.main_rank else nullcontext():
            self.engine.save_pretrained(target, self.tokenizer)
        self.saved.add(step)

    def _save_state(self, step: int) -> None:
        import torch.distributed as dist

        path = saved_state.state_path(self.run_dir, step)
        # The main rank makes the temporary folder, and every rank writes its part into it.
        progress = {
            "step": step,
            "rows": self.batches.digest,
            "held_out": held_out_digest(self.held_out),
            "lm_steps": self.batches.num_lm_steps,
        }
        folder = self._from_main(lambda: saved_state.begin(path, [ROLE], progress))
        try:
            written = self.engine.save_state(folder / ROLE)
        except CheckpointError:
            saved_state.discard(folder)
            raise
        # The state is complete only with the digests of what all ranks have written.
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, written)
        if self.main_rank:
            saved_state.finish(
                folder, path, {f"{ROLE}/{name}": found for part in parts for name, found in part.items()}
            )

    def _tidy(self, *also: int) -> None:
        """Remove states beyond `trainer.max_ckpt_to_keep`, and models that are neither those of a state, nor the best,
        nor of the steps `also`."""
        if not self.main_rank:
            return
        states = list(saved_state.saved(self.run_dir))
        kept = states[-(self.trainer.max_ckpt_to_keep or len(states)) :] if states else []
        steps = {*map(saved_state.step_of, kept), *also, *([self._best_step()] if self.losses else [])}
        models = [path for path in saved_state.step_folders(self.run_dir) if saved_state.step_of(path) not in steps]
        for path in (*models, *(state for state in states if state not in kept)):
            shutil.rmtree(path)

    def _result(self, last: int) -> Path:
        best = self._best_step() if self.losses else last
        if self.losses and self.main_rank:
            lowest, at_end = self.losses[best], self.losses.get(last)
            end = "" if at_end is None else f"; {at_end:.4f} at step {last}, the last"
            log.info("held-out loss %.4f at step %d, the lowest%s", lowest, best, end)
        return self.run_dir / f"{PREFIX}{best}"


def _line(step: int, metrics: Mapping[str, float]) -> bytes:
    return json.dumps({"step": step, "time": time.time()} | dict(metrics)).encode() + b"\n"


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


if __name__ == "__main__":
    leave(main())
