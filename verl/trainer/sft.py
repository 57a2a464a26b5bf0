"""`python3 -m verl.trainer.sft key=value ...`: supervised warm start on rows of segments.

Each segment is tokenised on its own, without special tokens, exactly as an episode's context is put together. The
first `data.lm_fraction` of the steps are language modelling on all tokens, the others train on policy segments only.
Several workers: start it with torchrun.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.command_line import load_from_argv
from verl.config.sft import SftConfig, load_sft_config
from verl.errors import DataError, VerlError

if TYPE_CHECKING:
    import torch

    from verl.protocol import TrainBatch

log = logging.getLogger(__name__)

PHASES = ("lm", "policy")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 a problem the user can act on, 130 interrupted."""
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line, datefmt="%H:%M:%S")
    try:
        config = load_from_argv(SftConfig, load_sft_config, sys.argv[1:] if argv is None else argv, "sft")
        target = run(config)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was saved", file=sys.stderr)
        return 130
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"model: {target}")
    return 0


def run(config: SftConfig) -> Path:
    """Train, save, and return the model's folder. Raises VerlError."""
    rows = read_rows(config.data.train_files)

    import torch.distributed as dist

    from verl.engine.device import init_process_group, resolve_device

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = resolve_device(config.trainer.device, int(os.environ.get("LOCAL_RANK", "0")))
    with tempfile.TemporaryDirectory() as folder:
        init_process_group(rank, world_size, "env://" if world_size > 1 else f"file://{folder}/store", device)
        try:
            return train(config, rows, device)
        finally:
            dist.destroy_process_group()


def train(config: SftConfig, rows: Sequence[Row], device: torch.device) -> Path:
    """The steps, inside a process group; writes `metrics.jsonl` and `global_step_N` into the run folder."""
    from tqdm import tqdm

    from verl.engine.sft_engine import SftEngine
    from verl.engine.sharding import is_main_rank

    tokenizer = load_tokenizer(config.model.path)
    engine = SftEngine(config, device)
    batches = Batches(config, tokenizer, rows)
    run_dir = Path(config.trainer.default_local_dir)
    main_rank = is_main_rank()
    metrics_file = _open_metrics(run_dir) if main_rank else None
    num_steps = config.trainer.total_training_steps
    try:
        bar = tqdm(range(num_steps), desc="sft", disable=not (main_rank and sys.stderr.isatty()))
        for step in bar:
            phase, batch = batches.next(step)
            metrics = engine.step(batch)
            bar.set_postfix_str(f"{phase} loss {metrics.get('loss', 0.0):.3f}")
            if metrics_file is None:
                continue
            record = {f"sft/{name}": value for name, value in metrics.items()}
            record["sft/lm_phase"] = float(phase == "lm")
            metrics_file.write(json.dumps({"step": step + 1, "time": time.time(), **record}) + "\n")
            metrics_file.flush()
            if bar.disable and (step + 1) % config.trainer.log_freq == 0:
                log.info("step %d/%d %s loss %.4f", step + 1, num_steps, phase, metrics.get("loss", 0.0))
    finally:
        if metrics_file is not None:
            metrics_file.close()
    target = run_dir / f"global_step_{num_steps}"
    engine.save_pretrained(target, tokenizer)
    return target


@dataclass(frozen=True)
class Row:
    """One training row before tokenisation; `where` names file and row number for error messages."""

    sources: tuple[str, ...]
    texts: tuple[str, ...]
    phase: str | None
    where: str


def read_rows(files: str | Sequence[str]) -> list[Row]:
    """All rows of the parquet files. Raises DataError naming file, row and column."""
    paths = [Path(name).expanduser() for name in ([files] if isinstance(files, str) else files)]
    rows = [row for path in paths for row in _read_file(path)]
    if not rows:
        raise DataError(f"data.train_files: no rows in {', '.join(map(str, paths)) or 'no file at all'}")
    return rows


def _read_file(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DataError(f"{path}: no such file; set data.train_files to a parquet file with a column 'segments'")
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet: {error}") from error
    if "segments" not in table.column_names:
        raise DataError(f"{path}: column 'segments' is missing; its columns are {', '.join(table.column_names)}")
    phases = table["phase"].to_pylist() if "phase" in table.column_names else [None] * len(table)
    for number, (segments, phase) in enumerate(zip(table["segments"].to_pylist(), phases, strict=True)):
        yield _row(segments, phase, f"{path}: row {number}")


def _row(segments: Any, phase: str | None, where: str) -> Row:
    from verl.protocol import Source

    if phase is not None and phase not in PHASES:
        raise DataError(f"{where}, column 'phase': {phase!r} is neither 'lm' nor 'policy'")
    if not segments:
        raise DataError(f"{where}, column 'segments': is empty")
    for segment in segments:
        if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
            raise DataError(f"{where}, column 'segments': {segment!r} is not a struct of the strings source and text")
        if segment.get("source") not in list(Source):
            raise DataError(f"{where}, column 'segments': source {segment.get('source')!r} is not {', '.join(Source)}")
    return Row(tuple(s["source"] for s in segments), tuple(s["text"] for s in segments), phase, where)


class Batches:
    """Batches of a step: rows of the step's phase in random order, every row once before any comes again."""

    def __init__(self, config: SftConfig, tokenizer: Any, rows: Sequence[Row]) -> None:
        """Tokenises all rows. Raises DataError for a phase without rows and for a row that is too long or untrained."""
        self.batch_size = config.data.train_batch_size
        self.num_lm_steps = round(config.data.lm_fraction * config.trainer.total_training_steps)
        num_policy_steps = config.trainer.total_training_steps - self.num_lm_steps
        self._orders: dict[str, Iterator[int]] = {}
        self._rows: dict[str, list[TokenisedRow]] = {}
        for phase, num_steps in zip(PHASES, (self.num_lm_steps, num_policy_steps), strict=True):
            if not num_steps:
                continue
            chosen = [row for row in rows if row.phase in (None, phase)]
            if not chosen:
                raise DataError(f"data.train_files: no row has phase {phase!r}, but {num_steps} steps need them")
            self._rows[phase] = [tokenise(tokenizer, row, phase, config.data.max_length) for row in chosen]
            self._orders[phase] = _endless_order(len(chosen), config.trainer.seed + PHASES.index(phase))

    def next(self, step: int) -> tuple[str, TrainBatch]:
        """Phase and batch of `step` (from 0); to be called for each step once, in order."""
        import torch

        from verl.protocol import TrainBatch

        phase = "lm" if step < self.num_lm_steps else "policy"
        rows = [self._rows[phase][next(self._orders[phase])] for _ in range(self.batch_size)]
        lengths_B = torch.tensor([len(row.ids_L) for row in rows], dtype=torch.int64)
        ids_T = torch.cat([row.ids_L for row in rows])
        return phase, TrainBatch(lengths_B, {"ids": ids_T, "loss_mask": torch.cat([row.loss_mask_L for row in rows])})


@dataclass(frozen=True)
class TokenisedRow:
    """`ids_L` int64 and `loss_mask_L` bool."""

    ids_L: torch.Tensor
    loss_mask_L: torch.Tensor


def tokenise(tokenizer: Any, row: Row, phase: str, max_length: int) -> TokenisedRow:
    """Ids of each segment on its own; the mask is all tokens but the first (lm) or policy segments' (policy)."""
    import torch

    ids: list[int] = []
    mask: list[bool] = []
    ids_of_segments = tokenizer(list(row.texts), add_special_tokens=False)["input_ids"]
    for source, segment_ids in zip(row.sources, ids_of_segments, strict=True):
        ids += segment_ids
        mask += [phase == "lm" or source == "policy"] * len(segment_ids)
    if len(ids) > max_length:
        raise DataError(f"{row.where}: {len(ids)} tokens are more than data.max_length={max_length}")
    if not any(mask[1:]):
        raise DataError(f"{row.where}: there is nothing to train on in phase {phase!r}")
    mask[0] = False  # nothing comes before it that could predict it
    return TokenisedRow(torch.tensor(ids), torch.tensor(mask))


def load_tokenizer(path: str) -> Any:
    """The model folder's tokenizer. Raises ConfigError."""
    from transformers import AutoTokenizer

    from verl.errors import ConfigError

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer at model.path='{path}': {error}") from error


def _endless_order(num_rows: int, seed: int) -> Iterator[int]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(num_rows, generator=generator).tolist()


def _open_metrics(run_dir: Path) -> Any:
    run_dir.mkdir(parents=True, exist_ok=True)
    return (run_dir / "metrics.jsonl").open("w", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
