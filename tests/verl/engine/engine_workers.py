"""What FSDP workers do in the tests, and the processes that do it; their results are left in files."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU, make_batch, make_engine
from engine_state import full_state, gradients, save_state, whole, whole_weights
from forked import ranks
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from verl.engine.batching import ModelInput, RankValues, merge_rows
from verl.engine.device import residence
from verl.engine.device.runtime import device_mesh, init_process_group
from verl.engine.files import slices
from verl.engine.learner import TokenLoss
from verl.engine.merging import merged_tensors
from verl.engine.policy_engine import PolicyEngine
from verl.engine.token_values import exchange, rows_of
from verl.errors import NumericalError
from verl.planning.dry_run.passes import collective_kind
from verl.protocol import TrainBatch
from verl.weight_sync.buckets import gathered

ACTOR = "actor_rollout_ref.actor"
KL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full_reverse", f"{ACTOR}.kl_loss_coef=0.3")
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "all_at_once": (12, ()),
    "token_budget": (12, (f"{ACTOR}.ppo_max_token_len_per_gpu=40",)),
    "fixed_rows": (11, (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size=4")),
    "one_row_for_two_workers": (1, ()),
    "gradient_checkpointing": (12, ("actor_rollout_ref.model.enable_gradient_checkpointing=true",)),
    "top_k_kl": (12, (f"{ACTOR}.kl_loss_type=full_forward", f"{ACTOR}.kl_topk_tokens=4")),
    "per_sequence": (12, (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.policy_loss=gspo")),
    "last_layer": (12, ("actor_rollout_ref.model.trained_layers=1",)),
    "one_unit": (12, (f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=1000000",)),
}
FSDP = f"{ACTOR}.fsdp_config"
LORA = ("actor_rollout_ref.model.lora_rank=3",)  # which two workers do not share evenly
IN_PAIRS = (f"{FSDP}.fsdp_size=2",)
OFFLOAD = (
    *(f"{FSDP}.{part}_offload=true" for part in ("param", "grad", "optimizer")),
    "actor_rollout_ref.ref.fsdp_config.param_offload=true",
)
MINI_BATCHES = (f"{ACTOR}.ppo_mini_batch_size=5", f"{ACTOR}.ppo_max_token_len_per_gpu=60", f"{ACTOR}.ppo_epochs=2")


Task = Callable[[Path, str, str], dict[str, Any]]


def run(
    folder: Path, model_path: str, other_model_path: str, num_workers: int, task: Task, fresh: bool = False
) -> list[dict[str, Any]]:
    """What `task` returns on each rank; one alone is this process. Others stay for more tasks unless they have to be
    `fresh`: the first engine of a process takes it a second.
    """
    if num_workers == 1:
        return [task(folder, model_path, other_model_path)]
    with contextlib.ExitStack() as stack:
        pipes = stack.enter_context(_started(num_workers)) if fresh else _kept(num_workers).pipes
        for pipe in pipes:
            pipe.send((task, folder, model_path, other_model_path))
        waiting = list(pipes)
        try:
            while waiting:
                for pipe in cast(list[Connection], wait(waiting)):
                    waiting.remove(pipe)
                    if failure := pipe.recv():
                        raise RuntimeError(failure)
        except BaseException:
            _kept.cache_clear()  # a rank may wait for the one that failed
            raise
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(num_workers)]


class _Kept:
    """Processes that end with this object."""

    def __init__(self, num_workers: int) -> None:
        self._stack = contextlib.ExitStack()
        self.pipes = self._stack.enter_context(_started(num_workers))

    def __del__(self) -> None:
        self._stack.close()


_kept = cache(_Kept)


@contextlib.contextmanager
def _started(num_workers: int) -> Iterator[list[Connection]]:
    ours, theirs = zip(*(Pipe() for _ in range(num_workers)), strict=True)
    with tempfile.TemporaryDirectory() as meeting, ranks(num_workers, _worker, num_workers, meeting, theirs):
        for pipe in theirs:
            pipe.close()  # so that the death of the process that has it is noticed
        yield list(ours)


def evaluate(
    folder: Path,
    model_path: str,
    other_model_path: str,
    cases: Sequence[str] = tuple(CASES),
    sharding: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The cases in the process group there is."""
    results: dict[str, Any] = {"gradients": {}}
    options = {"anchor_path": other_model_path}
    for name in cases:
        num_rows, overrides = CASES[name]
        engine = make_engine(model_path, folder, *KL, *sharding, *overrides, **options)
        results["gradients"][name] = gradients(engine, make_batch(num_rows))
    engine = make_engine(model_path, folder, *KL, *sharding, *MINI_BATCHES, **options)
    batch = make_batch(12)
    for _ in range(3):
        engine.follow_anchor(0.9)
    results["followed"] = full_state(engine, "anchor")
    results["metrics"] = []
    for _ in range(3):
        results["metrics"].append(engine.update(batch))
        engine.follow_anchor(0.9)
    results["policy"], results["anchor"] = full_state(engine), full_state(engine, "anchor")
    engine.save_pretrained(folder / "saved", None)
    engine.load_saved(folder / "saved", "anchor")
    results["restored"] = full_state(engine, "anchor")
    results["part"] = tuple(engine.log_probs(batch, 1.0))
    batch.tokens["advantages"].fill_(float("nan"))
    try:
        engine.update(batch)
    except NumericalError as error:
        results["message"] = str(error)
    return results


@cache
def alone(task: Task, model_path: str, other_model_path: str) -> dict[str, Any]:
    """What one rank finds, which is what several are compared with."""
    with tempfile.TemporaryDirectory() as folder:
        return task(Path(folder), model_path, other_model_path)


def save_and_go_on(
    folder: Path, model_path: str, other_model_path: str, sharding: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Two steps, a state in folder/state, and one step more."""
    engine = make_engine(model_path, folder, *KL, *sharding, *MINI_BATCHES, anchor_path=other_model_path)
    for seed in (0, 1):
        engine.update(make_batch(12, seed=seed))
        engine.follow_anchor(0.9)
    save_state(engine, folder / "state")
    return _whole_state(engine) | {"next": engine.update(make_batch(12, seed=2))}


def load_and_go_on(state: Path, folder: Path, model_path: str, other_model_path: str) -> dict[str, Any]:
    """From a state: one step more."""
    engine = make_engine(other_model_path, folder, *KL, *MINI_BATCHES, anchor_path=model_path)
    engine.load_state(state)
    return _whole_state(engine) | {"next": engine.update(make_batch(12, seed=2))}


def move_and_stay(
    folder: Path, model_path: str, other_model_path: str, adapters: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The same steps with tensors that move between the phases, and with tensors that stay."""
    results, settings = {}, (*KL, *OFFLOAD, *adapters)
    for name, moving in (("moved", True), ("stayed", False)):
        residence.moves_on = lambda device, moving=moving: moving
        engine = make_engine(model_path, folder, *settings, anchor_path=other_model_path)
        on_device = [len(engine.residence.on_device)]
        metrics = []
        for seed in (0, 1):
            part = engine.log_probs(make_batch(12, seed=seed), 1.0, "anchor")
            metrics.append(engine.update(make_batch(12, seed=seed)))
            engine.follow_anchor(0.9)
            on_device.append(len(engine.residence.on_device))
        state = save_state(engine, folder / name)
        engine.save_pretrained(folder / f"{name}_saved", None)
        whole_state = _whole_state(engine)
        start = model_path if adapters else other_model_path  # a state with adapters belongs to its base
        resumed = make_engine(start, folder, *settings, anchor_path=model_path)
        resumed.load_state(state)
        on_device.append(len(resumed.residence.on_device))
        metrics.append(resumed.update(make_batch(12, seed=2)))
        engine.load_saved(folder / f"{name}_saved", "anchor")
        results[name] = whole_state | {
            "on_device": on_device,
            "movable": len(engine.residence._movable),
            "metrics": metrics,
            "log_prob": part.tokens["log_prob"],
            "resumed": whole_weights(resumed),
            "bucket": gathered(merged_tensors(engine.policy), torch.float32),
            "restored": whole_weights(engine, "anchor"),
        }
    return results


def _whole_state(engine: PolicyEngine) -> dict[str, Any]:
    """Tensors gathered on every rank."""
    named = engine.policy.named_parameters()
    moments = {
        f"{key}.{name}": whole(value).clone()
        for name, parameter in named
        for key, value in engine.learner.optimizer.state.get(parameter, {}).items()
    }
    policy, anchor = (
        {name: tensor.clone() for name, tensor in whole_weights(engine, of).items()} for of in ("policy", "anchor")
    )
    return {"policy": policy, "anchor": anchor, "moments": moments, "step": engine.step}


def _worker(rank: int, num_workers: int, meeting: str, pipes: Sequence[Connection]) -> None:
    """Does the tasks that it is sent, and answers each with the traceback of its error, or with None."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    init_process_group(rank, num_workers, f"file://{meeting}/store", CPU)
    while True:
        task, folder, *paths = pipes[rank].recv()
        failure = None
        try:
            torch.save(task(folder, *paths), folder / f"rank_{rank}.pt")
        except BaseException:
            failure = traceback.format_exc()
        pipes[rank].send(failure)


def exchange_rows(folder: Path, model_path: str, other_model_path: str) -> dict[str, Any]:
    """Rows 0 and 3 are with rank 0, 2 and 1 with rank 1; then each gets others. Tokens are 10 row + place."""
    lengths_B, device = torch.tensor([2, 1, 3, 2]), torch.device("cpu")
    rows = ([0, 3], [2, 1])[dist.get_rank()]
    value_T = torch.cat([10.0 * row + torch.arange(int(lengths_B[row])) for row in rows])
    own = RankValues(rows, {"value": value_T, "pair": torch.stack([value_T, -value_T], -1)})
    got = exchange(own, lengths_B, [[1, 3], [0, 2, 3]], device)
    again = exchange(own, lengths_B, [[], [1]], device)
    try:
        exchange(RankValues([0], {"value": torch.zeros(2)}), lengths_B, [[1], [1]], device)
    except ValueError as error:
        message = str(error)
    asked = ([3, 1], [3, 0])[dist.get_rank()]
    found = rows_of(got, lengths_B, asked)
    return {"got": tuple(got), "again": tuple(again), "message": message, "found": found}


def learn_from_own_columns(folder: Path, model_path: str, other_model_path: str) -> dict[str, Any]:
    """Two steps with the most likely tokens where each rank found them, and with those of all ranks in the batch."""
    overrides = (*KL, f"{ACTOR}.kl_topk_tokens=4", *MINI_BATCHES, f"{ACTOR}.shuffle=true")
    results: dict[str, Any] = {}
    for name in ("own", "whole"):
        engine = make_engine(model_path, folder, *overrides, anchor_path=other_model_path)
        metrics = []
        for seed in (0, 1):
            batch = make_batch(12, seed=seed)
            rows, found = engine.log_probs(batch, 1.0, top_k=4)
            own = RankValues(rows, {"top_index": found["top_index"]})
            if name == "whole":
                everyones: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everyones, (rows, found["top_index"]))
                batch.tokens["top_index"] = merge_rows(batch.lengths_B, everyones)
            metrics.append(engine.update(batch, own if name == "own" else None))
        results[name] = metrics, full_state(engine)
    return results


def score_in_update(folder: Path, model_path: str, other_model_path: str) -> dict[str, Any]:
    """One step with a Top-k KL whose update finds all that it needs of the policy, and one with a pass before it."""
    overrides = (*KL, f"{ACTOR}.kl_topk_tokens=4", f"{ACTOR}.ppo_max_token_len_per_gpu=60", f"{ACTOR}.optim.eps=1e-2")
    first, second = (make_engine(model_path, folder, *overrides, anchor_path=other_model_path) for _ in range(2))
    batch = make_batch(12)
    rows, found = first.log_probs(batch, 1.0, top_k=4)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (rows, found["log_prob"]))
    batch.tokens["old_log_probs"] = merge_rows(batch.lengths_B, everyones)
    expected = first.update(batch, RankValues(rows, {"top_index": found["top_index"]}))
    del batch.tokens["old_log_probs"]
    metrics, scores = second.update_and_score(batch)
    return {
        "before": (rows, found),
        "scores": tuple(scores),
        "expected": expected,
        "metrics": metrics,
        "expected_weights": full_state(first),
        "weights": full_state(second),
    }


def stream_shards(
    folder: Path, model_path: str, other_model_path: str, fsdp_size: int = -1, batch_bytes: int = slices.BATCH_BYTES
) -> dict[str, Any]:
    """Weights that the ranks share, some with fewer rows than ranks, as a stream: on rank 0 what came out of it. Of
    each rank the operations of its batches, and how often something was sent or received outside of a batch.
    """
    mesh = device_mesh(CPU, fsdp_size)
    whole_ones = [torch.arange(13 * 3.0).view(13, 3), torch.arange(2.0), torch.arange(8 * 2).view(8, 2).bfloat16()]
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    shared = [distribute_tensor(tensor, mesh, placements) for tensor in whole_ones]
    batches: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        batched, alone = dist.batch_isend_irecv, Counter[str]()
        patch.setattr(slices, "BATCH_BYTES", batch_bytes)
        patch.setattr(
            dist, "batch_isend_irecv", lambda ops: (batches.append([op.op.__name__ for op in ops]), batched(ops))[1]
        )
        for name in ("send", "recv"):
            single = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, n=name, f=single, **o: (alone.update([n]), f(*a, **o))[1])
        found = [part.clone() for part in slices.stream([*shared, torch.ones(2)])]
    expected = [*(tensor.flatten() for tensor in whole_ones), torch.ones(2)]
    values, wanted = (torch.cat([part.float() for part in parts]) if parts else None for parts in (found, expected))
    right = None if values is None else torch.equal(values, wanted)
    return {"right": right, "batches": batches, "alone": dict(alone)}


def count_collectives(folder: Path, model_path: str, other_model_path: str, in_pairs: bool) -> dict[str, Any]:
    """Rank 0: a mini-batch of three micro-batches, by `reduce_gradients`: its gradient and the collectives it took."""
    size = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size=4")
    found: dict[str, Any] = {}
    for setting in ("micro_batch", "mini_batch"):
        how = (f"{FSDP}.reduce_gradients={setting}", *(IN_PAIRS if in_pairs else ()))
        learner = (engine := make_engine(model_path, folder, *size, *how)).learner
        calls: list[ModelInput] = []

        def loss(
            batch: TrainBatch, inputs: ModelInput, engine: PolicyEngine = engine, calls: list = calls
        ) -> TokenLoss:
            calls.append(inputs)
            return engine.objective(batch, inputs)

        is_first = dist.get_rank() == 0
        with profile(activities=[ProfilerActivity.CPU]) if is_first else contextlib.nullcontext() as profiled:
            learner.accumulate(make_batch(12), loss)
        gradient = {name: whole(p.grad) for name, p in engine.policy.named_parameters() if p.grad is not None}
        if profiled is None:
            continue
        operations = [event.name for event in profiled.events() if event.name.startswith("c10d::")]
        found[setting] = {
            "num_micro_batches": len(calls),
            "counts": dict(Counter(collective_kind(operation) for operation in operations)),
            "events": [name for _, name in sorted(_unit_events(profiled))],
            "gradient": gradient,
        }
    return found


def _unit_events(profiled: profile) -> Iterator[tuple[float, str]]:
    """When FSDP2 began to gather a unit, and when it was done with it."""
    kinds = {"all_gather": "gather", "post_forward": "done", "post_backward_reshard": "backward done"}
    for event in profiled.events():
        match = re.fullmatch(r"FSDP::(\w+)(?: \((.*)\))?", event.name)
        if match and match[1] in kinds and (match[2] or match[1] == "all_gather"):
            yield event.time_range.start, f"{kinds[match[1]]} {match[2].rsplit('.', 1)[-1] if match[2] else 'root'}"


def adapt(folder: Path, model_path: str, other_model_path: str, sharding: tuple[str, ...] = ()) -> dict[str, Any]:
    """Adapters with a reference that is their base: gradients, two steps, what is saved."""
    results: dict[str, Any] = {"gradients": {}}
    for name in ("all_at_once", "one_row_for_two_workers", "gradient_checkpointing", "top_k_kl", "last_layer"):
        num_rows, overrides = CASES[name]
        engine = make_engine(model_path, folder, *KL, *LORA, *sharding, *overrides, with_anchor=True)
        engine.update(make_batch(12, seed=1))  # from zeros A has no gradient
        results["gradients"][name] = gradients(engine, make_batch(num_rows))
    engine = make_engine(model_path, folder, *KL, *LORA, *sharding, *MINI_BATCHES, with_anchor=True)
    results["metrics"] = [engine.update(make_batch(12, seed=seed)) for seed in range(2)]
    results["policy"], results["anchor"] = full_state(engine), full_state(engine, "anchor")
    engine.save_pretrained(folder / "saved", None)
    return results | {"base": json.loads((save_state(engine, folder / "state") / "base.json").read_text())}


def shared_by(size: int) -> tuple[str, ...]:
    """That many ranks have the same rows."""
    return (f"{ACTOR}.ulysses_sequence_parallel_size={size}", "actor_rollout_ref.model.use_remove_padding=true")
