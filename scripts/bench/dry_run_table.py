"""Dry runs of the published train scripts: the memory of each phase and the least time of a step, model by model.

    python scripts/bench/dry_run_table.py --gpus 8x80 --models tests/verl/trainer/shapes/Qwen2.5-{3B,7B}
    python scripts/bench/dry_run_table.py --gpus 32x80 --models .../Qwen2.5-72B --set tensor_model_parallel_size=4 ...

    python scripts/bench/dry_run_table.py --arithmetic --gpus 4x8x80 --scripts example/multinode/... --models ...

A row is a script with a model; `--set` changes a setting of all rows. Models need a config.json alone. `--arithmetic`
adds below each row a sum of each phase by hand, without running anything: what it leaves out is the difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from verl.config import Config
from verl.config.loading.run import load_stored_config
from verl.config.rules.placement import num_ranks
from verl.config.rules.predicates import window_of
from verl.engine.files.loading import ModelShape, policy_shape
from verl.phases import Phase
from verl.planning.dry_run.device import CUDA_GRAPHS, CUDA_PROCESS
from verl.planning.dry_run.place import GIB, Place, located, parse_gpus
from verl.planning.dry_run.report import least_seconds_of_step
from verl.planning.dry_run.run import DryRun, dry_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("train_grpo.sh", "train_ppo.sh", "train_grpo_ema_pg.sh")


def settings(script: str, folder: Path) -> Path:
    """The file of all settings that a script has, as the script itself says them."""
    command = ["bash", str(ROOT / script), "--cfg", "job"]
    environment = os.environ | {"BASE_MODEL": "org/model", "DATA_DIR": str(folder)}
    made = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    path = folder / f"{Path(script).name}.yaml"
    path.write_text(made.stdout)
    return path


def config_of(path: Path, model: Path, changes: list[str]) -> Config:
    critic = f"critic.model.path={model}"
    return load_stored_config(path, [f"actor_rollout_ref.model.path={model}", critic, *changes])


def row(name: str, config: Config, found: DryRun, place: Place, seconds: float) -> str:
    """One line: GiB of each phase, what is left in the largest, the least seconds of a step."""
    by_phase = {name: max(one.total for one in found.phases if one.phase is name) / GIB for name in Phase}
    left = place.memory / GIB - max(by_phase.values())
    sizes = "".join(f"{by_phase[phase]:8.1f}" for phase in Phase)
    times = [least_seconds_of_step(config, found.roles, gpu) for gpu in place.gpus]
    return f"{name:<36}{sizes}{left:8.1f}" + "".join(f"{time:10.0f}" for time in times) + f"{seconds:9.1f}"


# The sum of each phase by hand, for GRPO with gradient checkpointing, rows of full length and a frozen anchor.

CHUNK, CHUNK_COPIES = GIB // 2, 3  # logits of a chunk in float32, their softmax, and the gradient of one of them
GATHERED = 2  # layers, in bfloat16: the one that works and the next


def by_hand(config: Config, policy: ModelShape, place: Place) -> dict[Phase, float]:
    """Bytes of a GPU by phase. P parameters over R ranks: 4 P / R each of weights, gradients, two moments, anchor."""
    role = config.actor_rollout_ref
    fsdp, rollout, ranks = role.actor.fsdp_config, role.rollout, num_ranks(config, "actor")
    shard, window = 4 * policy.num_params / ranks, window_of(config)
    moments = 0 if fsdp.optimizer_offload else 2 * shard
    anchor = 0 if role.ref.fsdp_config.param_offload else shard
    at_rest = (0 if fsdp.param_offload else shard) + moments + anchor

    # A layer's weights when gathered, and what it keeps in bfloat16 for each token: 4 widths and 3 of its MLP.
    # Embedding and head stay gathered for the whole pass, in bfloat16; the head's factors are cast to float32.
    embedding = policy.num_embeddings * policy.hidden
    layer = (policy.num_params - embedding - policy.num_looked_up) / policy.num_layers
    gathered, a_token = 2 * GATHERED * layer, 2 * (4 * policy.hidden + 3 * policy.mlp)
    root, head = 2 * (embedding + policy.num_looked_up), 4 * embedding + CHUNK_COPIES * CHUNK
    scored = max(1, rollout.log_prob_micro_batch_size // ranks) * window
    trained = max(1, role.actor.ppo_micro_batch_size // ranks) * window
    engine_ranks = rollout.tensor_model_parallel_size
    processes = 2 * CUDA_PROCESS + (0 if rollout.enforce_eager else CUDA_GRAPHS)  # the actor's, and a sleeping engine's

    # In an update: the inputs of all layers; one layer recomputed, with gradients, or the head with float32 gradients.
    kept = 2 * policy.num_layers * trained * policy.hidden
    working = root + max(gathered + 2 * a_token * trained + 4 * layer, head + 4 * embedding)
    buckets = 2 * max(rollout.weight_sync.bucket_mib * 2**20, 2 * embedding)
    layers = max(gathered + a_token * scored, head)
    return {
        Phase.SAMPLE: at_rest + rollout.gpu_memory_utilization * place.memory + CUDA_PROCESS,
        Phase.SCORE: shard + moments + anchor + root + layers + processes,
        Phase.UPDATE: 4 * shard + anchor + kept + working + processes,
        Phase.SYNC: at_rest + buckets + 2 * policy.num_params / engine_ranks + processes - CUDA_PROCESS,
    }


def compared(config: Config, found: DryRun, place: Place) -> Iterator[str]:
    """Dry run, sum by hand and difference of each phase, and how many trajectories an engine samples at once."""
    config = located(config, place)
    summed = by_hand(config, policy_shape(config), place)
    for phase in Phase:
        dry = max(one.total for one in found.phases if one.phase is phase) / GIB
        hand = summed[phase] / GIB
        yield f"    {phase:<8}{dry:8.1f}{hand:8.1f}{dry - hand:8.1f}"
    yield f"    at once: {found.at_once.number} of {found.at_once.share} ({found.at_once.tokens} tokens)"


def main() -> None:
    """Print the table, and below it what does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpus", default="8x80")
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--scripts", nargs="+", default=SCRIPTS)
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value")
    parser.add_argument(
        "--arithmetic", action="store_true", help="add the sums by hand: phase, dry run, sum, difference"
    )
    parser.add_argument("--advise", action="store_true", help="also try settings for what does not fit: takes longer")
    asked = parser.parse_args()
    place = parse_gpus(asked.gpus)
    print(f"{asked.gpus}: GPUs of {place.memory / GIB:.1f} GiB {' '.join(asked.set)}".rstrip())
    times = "".join(f"{f's {gpu.name}':>10}" for gpu in place.gpus)
    print(f"{'':<36}{''.join(f'{phase:>8}' for phase in Phase)}{'left':>8}{times}{'CPU s':>9}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        stored = {script: settings(script, Path(folder)) for script in asked.scripts}
        for model in asked.models:
            for script, path in stored.items():
                began = time.process_time()
                config = config_of(path, model.resolve(), asked.set)
                found = dry_run(config, place, advise=asked.advise)
                print(row(f"{script} {model.name}", config, found, place, time.process_time() - began))
                if asked.arithmetic:
                    print("\n".join(compared(config, found, place)), flush=True)
                if found.level != "ok":
                    print(f"    {found.level} {found.verdict}", flush=True)


if __name__ == "__main__":
    main()
