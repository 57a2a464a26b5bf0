"""`.venv/bin/python -m verl.trainer.sft key=value ...`: warm start on segments or conversations
(`verl.data.sft_rows`).

The first `data.lm_fraction` of the steps are language modelling on all tokens, the others train on policy segments
only. `trainer.n_gpus_per_node=2` trains with two workers on this machine; torchrun works as well.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from long_task import Progress
from verl.config.loading.command_line import is_sweep, load_from_argv
from verl.config.loading.run import load_sft_config
from verl.config.sections.schema import SftConfig
from verl.data.sft_rows import PHASES, Row, TokenisedRow, format_for, read_rows, tokenise, tokenise_conversation
from verl.errors import ConfigError, DataError
from verl.pretrained import load_tokenizer
from verl.process import startup
from verl.process.interrupts import heed_interrupts
from verl.process.ranks import RENDEZVOUS, is_rank, run_ranks
from verl.process.startup import exit_status
from verl.process.storage import append, work_without_home, writing
from verl.run.run_folder import archive, check_new_run, check_not_in_use, run_lock
from verl.run.saved_state import saving
from verl.tracking.jsonl_backend import FILE_NAME

if TYPE_CHECKING:
    import torch

    from verl.data.conversations import ConversationRow
    from verl.protocol import TrainBatch

CONFIG_NAME = "sft"
PROGRAM = "verl.trainer.sft"
log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status, as `exit_status` says."""
    startup.log_to_stderr()
    work_without_home()
    heed_interrupts()
    first_rank = int(os.environ.get("RANK", "0")) == 0
    if not first_rank:
        logging.getLogger("verl").setLevel(logging.WARNING)
    arguments = sys.argv[1:] if argv is None else argv
    if is_sweep(arguments, CONFIG_NAME):
        return exit_status(lambda: run_sweep(arguments), "the same command resumes the sweep")

    ranks_ended = 0

    def warm_start() -> None:
        nonlocal ranks_ended
        config = load_from_argv(SftConfig, load_sft_config, arguments, CONFIG_NAME)
        if config.trainer.n_gpus_per_node > 1 and "RANK" not in os.environ:
            check_start(config)
            ranks_ended = run_ranks([sys.executable, "-m", PROGRAM, *arguments], config.trainer.n_gpus_per_node)
            return
        target = run(config)
        if first_rank:
            print(f"model: {target}")

    status = exit_status(warm_start, when_interrupted="" if is_rank() else "nothing was saved")
    return status or ranks_ended


def run_sweep(arguments: Sequence[str]) -> None:
    """A warm start for every combination of the values that `-m` asks for."""
    from verl.trainer.sweep import sweep

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("-m starts processes of its own, so it does not go with torchrun: start each run by itself")
    print(f"table: {sweep(PROGRAM, SftConfig, arguments, CONFIG_NAME, load_sft_config)}")


def check_start(config: SftConfig) -> None:
    """Raise ConfigError when another run uses the folder, or it holds one that must be kept. Fast."""
    run_dir = Path(config.trainer.default_local_dir)
    check_not_in_use(run_dir)
    check_new_run(run_dir, config.trainer.overwrite)
    startup.tell("the config is valid")


def run(config: SftConfig) -> Path:
    """Train as one worker, save, and return the model's folder. Raises VerlError."""
    run_dir = Path(config.trainer.default_local_dir)
    if not is_rank():
        check_start(config)
    with startup.phase("reading the rows"):
        rows = read_rows(config.data.train_files)

    with startup.phase("importing torch"):
        import torch.distributed as dist

        from verl.engine.device.runtime import init_process_group, resolve_device
        from verl.trainer.start_checks.finding import require
        from verl.trainer.start_checks.resources import check_folder

    require(check_folder(run_dir))

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = resolve_device(config.trainer.device, int(os.environ.get("LOCAL_RANK", "0")))
    with tempfile.TemporaryDirectory() as folder, run_lock(run_dir) if rank == 0 else nullcontext():
        meet = os.environ.get(RENDEZVOUS) or ("env://" if world_size > 1 else f"file://{folder}/store")
        init_process_group(rank, world_size, meet, device)
        try:
            return train(config, rows, device)
        finally:
            dist.destroy_process_group()


def train(config: SftConfig, rows: Sequence[Row | ConversationRow], device: torch.device) -> Path:
    """The steps, inside a process group; writes `metrics.jsonl` and `global_step_N` into the run folder."""
    with startup.phase(f"loading {config.model.path}"):
        from verl.engine.device.sharding import is_main_rank
        from verl.engine.sft_engine import SftEngine

        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code, "model.path")
        engine = SftEngine(config, device)
    engine.save_as_a_test(tokenizer, f"model.path={config.model.path}")
    with startup.phase(f"tokenising {len(rows)} rows"):
        batches = Batches(config, tokenizer, rows)
        batches.check_ids(engine.num_embeddings)
    run_dir = Path(config.trainer.default_local_dir)
    main_rank = is_main_rank()
    metrics_path = run_dir / FILE_NAME
    if main_rank:
        if target := archive(run_dir):
            log.warning("the run folder held an earlier run; it was moved to %s", target)
        with writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
    num_steps = config.trainer.total_training_steps
    startup.tell(f"step 1 of {num_steps}; one line every {config.trainer.log_freq} steps")
    with Progress("warm start", num_steps, unit="steps", shown=main_rank, lines=False) as progress:
        for step in range(num_steps):
            phase, batch = batches.next(step)
            metrics = engine.step(batch)
            told = f"{phase} loss {metrics.get('loss', 0.0):.4f}"
            progress.update(note=told)
            if not main_rank:
                continue
            record = {f"sft/{name}": value for name, value in metrics.items()}
            record["sft/lm_phase"] = float(phase == "lm")
            append(metrics_path, json.dumps({"step": step + 1, "time": time.time(), **record}).encode() + b"\n")
            if not progress.has_bar and (step + 1) % config.trainer.log_freq == 0:
                log.info("step %d/%d %s, %s", step + 1, num_steps, told, progress.pace())
    target = run_dir / f"global_step_{num_steps}"
    with saving(target) if main_rank else nullcontext():
        engine.save_pretrained(target, tokenizer)
    return target


class Batches:
    """Batches of a step: rows of the step's phase in random order, every row once before any is repeated.

    Each sequence of a conversation is a row.
    """

    def __init__(self, config: SftConfig, tokenizer: Any, rows: Sequence[Row | ConversationRow]) -> None:
        """Tokenises all rows. Raises DataError for a phase without rows, for a row that is too long or untrained, and
        for a conversation that the chat template cannot write; ConfigError for such a chat template."""
        self.batch_size = config.data.train_batch_size
        self.num_lm_steps = round(config.data.lm_fraction * config.trainer.total_training_steps)
        num_policy_steps = config.trainer.total_training_steps - self.num_lm_steps
        form = format_for(tokenizer, rows, config.data.thinking, config.data.apply_chat_template_kwargs)
        max_length = config.data.max_length
        self._orders: dict[str, Iterator[int]] = {}
        self._rows: dict[str, list[TokenisedRow]] = {}
        for phase, num_steps in zip(PHASES, (self.num_lm_steps, num_policy_steps), strict=True):
            if not num_steps:
                continue
            chosen = [row for row in rows if row.phase in (None, phase)]
            if not chosen:
                raise DataError(f"data.train_files: no row has phase {phase!r}, but {num_steps} steps need them")
            self._rows[phase] = []
            for row in chosen:
                if isinstance(row, Row):
                    self._rows[phase].append(tokenise(tokenizer, row, phase, max_length))
                elif form is not None:
                    self._rows[phase] += tokenise_conversation(form, row, phase, max_length)
            self._orders[phase] = _endless_order(len(self._rows[phase]), config.trainer.seed + PHASES.index(phase))

    def check_ids(self, num_embeddings: int) -> None:
        """Raise DataError for the first row with a token that a model of so many embeddings does not have."""
        for row in itertools.chain.from_iterable(self._rows.values()):
            if (largest := int(row.ids_L.max())) >= num_embeddings:
                raise DataError(
                    f"{row.where}: it has token {largest}, but the model has embeddings for 0 to {num_embeddings - 1}; "
                    "use its own tokenizer, or enlarge the model's embedding (resize_token_embeddings) and save it"
                )

    def next(self, step: int) -> tuple[str, TrainBatch]:
        """Phase and batch of `step` (from 0). Call it once for each step, in order."""
        import torch

        from verl.protocol import TrainBatch

        phase = "lm" if step < self.num_lm_steps else "policy"
        rows = [self._rows[phase][next(self._orders[phase])] for _ in range(self.batch_size)]
        lengths_B = torch.tensor([len(row.ids_L) for row in rows], dtype=torch.int64)
        ids_T = torch.cat([row.ids_L for row in rows])
        return phase, TrainBatch(lengths_B, {"ids": ids_T, "loss_mask": torch.cat([row.loss_mask_L for row in rows])})


def _endless_order(num_rows: int, seed: int) -> Iterator[int]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(num_rows, generator=generator).tolist()


if __name__ == "__main__":
    sys.exit(main())
