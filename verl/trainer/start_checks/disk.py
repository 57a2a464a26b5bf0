"""The run folder: whether it can be written, and whether its disk holds the checkpoints that a run keeps there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from verl.config import Config
from verl.config.rules.predicates import anchor_moves
from verl.process.storage import nearest_folder
from verl.trainer.start_checks.finding import Finding, judge
from verl.trainer.start_checks.models import Models

FLOAT32 = 4  # bytes
GIB = 2**30


def check_folder(folder: Path) -> Finding:
    """Check that the run folder can be written, by a file where it will be, which is removed."""
    existing = nearest_folder(folder)
    try:
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(os.urandom(4096))
            file.flush()
    except OSError as error:
        todo = "give it write access and room, or set trainer.default_local_dir to another folder"
        return Finding("FAIL", "run folder", f"{folder}: {error}", todo)
    return Finding("ok", "run folder", f"{folder} can be written")


def check_one_checkpoint(config: Config, models: Models, free: int) -> Finding:
    """Whether `free` bytes hold the first checkpoint."""
    needed, _ = checkpoint_bytes(config, models, steps=None)
    found = f"{config.trainer.default_local_dir}: {_in_words(free)} free, one checkpoint takes {_in_words(needed)}"
    todo = "free some space, or set trainer.default_local_dir to a larger disk"
    return judge(free >= needed, "disk", found, todo)


def check_all_checkpoints(config: Config, models: Models, steps: int | None, free: int) -> Finding:
    """Whether `free` bytes hold all checkpoints that a run of `steps` steps keeps."""
    needed, count = checkpoint_bytes(config, models, steps)
    found = f"{config.trainer.default_local_dir}: {_in_words(free)} free, {_in_words(needed)} needed"
    todo = "raise trainer.save_freq, set trainer.max_ckpt_to_keep, or set trainer.default_local_dir to a larger disk"
    return judge(free >= needed, "disk", f"{found} for {count} checkpoints", todo)


def checkpoint_bytes(config: Config, models: Models, steps: int | None) -> tuple[float, int]:
    """Bytes of all checkpoints together, and how many there are; `steps` None: unknown, one is counted.

    A checkpoint holds models in float32, and the state: what is trained with two moments of AdamW, and the anchor's
    weights. Adapters are also beside the model that they are merged into. One more than `max_ckpt_to_keep` is counted
    for the best, and one for that which is being written.
    """
    trainer, keep = config.trainer, config.trainer.max_ckpt_to_keep
    if trainer.val_only:
        return 0.0, 0
    count = 1 if steps is None or trainer.save_freq < 1 else -(-steps // trainer.save_freq)
    if keep is not None:
        count = min(count, keep + 2)
    trained = [models.policy] + ([models.critic] if models.critic else [])
    exported = sum(shape.num_params + shape.num_adapted for shape in trained)
    values = exported + 3 * sum(shape.num_trained for shape in trained)
    if models.anchor is not None:
        values += (2 if anchor_moves(config) else 1) * models.anchor.num_params
    return float(FLOAT32 * values * count), count


def _in_words(num_bytes: float) -> str:
    """A size in GiB, or in MiB where that says more."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
