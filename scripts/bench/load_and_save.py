"""Peak host memory of two workers while a model of random weights is loaded, sharded and saved.

    .venv/bin/python scripts/bench/load_and_save.py --gib 2 --folder /tmp/load_and_save

Peaks are of resident memory above where the worker stood before, mapped pages of files included (VmHWM of Linux,
started anew for each phase).
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config.sections.model import FsdpConfig, ModelConfig
from verl.engine.device.runtime import init_process_group
from verl.engine.files.loading import load_sharded
from verl.engine.files.saving import save_model
from verl.process.heap import return_free_memory

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model in float32")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the stored weights")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, required=True, help="where the model and its copy are written")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    source = arguments.folder / f"model_{arguments.gib:g}_{arguments.dtype}"
    if not source.exists():
        write_model(source, int(arguments.gib * 2**30 / 4), getattr(torch, arguments.dtype))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        passed = (arguments.num_workers, source, Path(scratch))
        torch.multiprocessing.spawn(work, passed, arguments.num_workers)
        for rank in range(arguments.num_workers):
            print(json.dumps(json.loads((Path(scratch) / f"{rank}.json").read_text())))


def write_model(folder: Path, num_parameters: int, dtype: torch.dtype) -> None:
    """Qwen2 layers of 1024 in a number that gives the size, with an embedding of 32,768 that the head shares."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    layer = 1024 * (2 * 1024 + 2 * 256 + 3 * 4096)
    num_layers = max(1, round((num_parameters - 2**25) / layer))
    config = Qwen2Config(vocab_size=2**15, num_hidden_layers=num_layers, tie_word_embeddings=True, **sizes)
    shutil.rmtree(folder, ignore_errors=True)
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)


def work(rank: int, num_workers: int, source: Path, scratch: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    init_process_group(rank, num_workers, f"file://{scratch}/store", device)
    fsdp = FsdpConfig()
    arguments = (str(source), ModelConfig(), fsdp, fsdp.mixed_precision, device, None, True)
    torch.ones(MIB).sum()  # what the first use of torch takes
    model, loading = measured(lambda: load_sharded(*arguments))
    _, saving = measured(lambda: save_model(model, scratch / "saved", None))
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    found = {"rank": rank, "shard_mib": round(sum(part.nbytes for part in parts) / MIB)}
    found |= {"load": loading, "save": saving}
    (scratch / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(call: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What it returns; seconds, and MiB that the resident memory rose above where it was."""
    dist.barrier()
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started = resident_mib("VmRSS"), time.monotonic()
    result = call()
    seconds = time.monotonic() - started
    return result, {"peak_mib": round(resident_mib("VmHWM") - before), "seconds": round(seconds, 1)}


def resident_mib(key: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
