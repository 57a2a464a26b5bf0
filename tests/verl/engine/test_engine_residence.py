"""What of a role is on its device in which phase: real moves, between two places in CPU memory."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
from engine_cases import CPU, make_batch, make_engine
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda import _pin_memory_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from value_cases import value_batch, value_engine, write_critic

from verl.algorithms import anchor as anchor_rule
from verl.engine.device import residence as residence_module
from verl.engine.device import torch_private
from verl.engine.device.memory import CudaMemory, DeviceMemory, device_memory
from verl.engine.files.slices import stream
from verl.engine.learner import Learner
from verl.engine.policy_engine import PolicyEngine
from verl.phases import RESIDENT, Part, Phase
from verl.weight_sync.buckets import Version, gathered
from verl.weight_sync.memory import HostBuckets, open_shared

TRAINED = {Part.PARAMETERS, Part.OPTIMIZER}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residence_module, "moves_on", lambda device: True)


@pytest.mark.parametrize("adapters", [(), engine_workers.LORA])
def test_two_ranks_train_to_the_same_bits_whether_or_not_their_tensors_move(
    adapters: tuple[str, ...], tmp_path: Path, model_path: str, other_model_path: str
) -> None:
    """61 rows over two ranks: one shard is padded. Saving, loading and going on happen while everything is away."""
    task = partial(engine_workers.move_and_stay, adapters=adapters)
    for rank in engine_workers.run(tmp_path, model_path, other_model_path, 2, task):
        stayed, moved = rank["stayed"], rank["moved"]
        assert moved["on_device"] == [0] * 4
        assert (moved["movable"], stayed["movable"]) == (4, 0)
        assert moved["metrics"] == stayed["metrics"]
        for name in ("policy", "anchor", "moments", "resumed", "restored"):
            assert moved[name].keys() == stayed[name].keys() and moved[name]
            assert all(torch.equal(tensor, stayed[name][key]) for key, tensor in moved[name].items())
        assert torch.equal(moved["log_prob"], stayed["log_prob"])
        assert moved["bucket"].keys() == moved["policy"].keys()
        assert all(torch.equal(tensor, moved["policy"][key]) for key, tensor in moved["bucket"].items())


def test_each_pass_has_on_the_device_what_its_phase_lists(
    moves: None, model_path: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = offloaded(model_path, run_dir)
    seen: list[tuple[str, set[Part]]] = []

    def note(what: str, function: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            seen.append((what, engine.residence.on_device))
            return function(*args, **options)

        return noted

    monkeypatch.setattr(engine.policy, "forward", note("policy", engine.policy.forward))
    monkeypatch.setattr(engine.anchor, "forward", note("anchor", engine.anchor.forward))
    monkeypatch.setattr(Learner, "learn", note("learn", Learner.learn))
    monkeypatch.setattr(anchor_rule, "follow", note("follow", anchor_rule.follow))
    engine.log_probs(make_batch(), 1.0)
    engine.log_probs(make_batch(), 1.0, "anchor")
    for _ in range(2):  # the optimizer has no state before its first step
        engine.update(make_batch())
    engine.follow_anchor(0.9)
    assert [what for what, _ in seen] == ["policy", "anchor", "learn", "policy", "learn", "policy", "follow"]
    found = [parts for _, parts in seen]
    assert found[:3] == [{Part.PARAMETERS}, {Part.ANCHOR}, {Part.PARAMETERS}]
    assert found[4] == TRAINED and found[4] < RESIDENT[Phase.UPDATE]
    assert found[6] == {Part.PARAMETERS, Part.ANCHOR}
    assert engine.residence.on_device == set()


def test_an_exact_kl_has_the_anchor_beside_the_policy(
    moves: None, model_path: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = offloaded(model_path, run_dir, *engine_workers.KL)
    monkeypatch.setattr(engine.learner, "learn", lambda *_: {"on": float(Part.ANCHOR in engine.residence.on_device)})
    assert engine.update(make_batch())["actor/on"] == 1.0


@pytest.mark.parametrize("also_optimizer", [False, True])
def test_moments_of_a_resumed_run_are_made_where_updates_look_for_them(
    moves: None,
    also_optimizer: bool,
    model_path: str,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the device with the parameters, as in the first update; off-loaded with them if moments are."""
    place = "actor_rollout_ref.actor.fsdp_config"
    keys = [f"{place}.param_offload=true", f"{place}.optimizer_offload={str(also_optimizer).lower()}"]
    engine = make_engine(model_path, run_dir, *keys)
    engine.update(make_batch())
    engine.start_saving_state(tmp_path)
    engine.resumable.saved()
    seen: list[set[Part]] = []
    load = engine.resumable.load
    monkeypatch.setattr(engine.resumable, "load", lambda *of: (seen.append(engine.residence.on_device), load(*of))[1])
    engine.load_state(tmp_path)
    assert seen == [set() if also_optimizer else {Part.PARAMETERS}] and engine.residence.on_device == set()


def test_an_off_loaded_weight_of_a_gpu_is_exported(model_path: str, run_dir: Path, tmp_path: Path) -> None:
    """The DTensor is of CUDA, as FSDP2 made it, and its part in host memory, as the residence left it."""
    make_engine(model_path, run_dir)  # for its process group
    mesh = init_device_mesh("cpu", (1,))
    with torch.no_grad(), FakeTensorMode():
        on_gpu = torch.empty(4, 3, device="cuda")
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32))
    weight = DTensor(on_gpu, spec, requires_grad=False)
    values = torch.arange(12.0).view(4, 3)
    torch_private.replace_local_part(weight, values)
    assert weight.device.type == "cuda" and weight.to_local().device.type == "cpu"

    assert torch.equal(gathered([("w", weight)], torch.float32)["w"], values)
    assert torch.equal(torch.cat([part.view(4, 3) for part in stream([weight])]), values)
    buckets = HostBuckets(tmp_path, 2**20)
    [payload] = buckets.export(Version({"w": weight}, [["w"]], torch.float32, 1), 0).exports.values()
    assert torch.equal(open_shared(payload)["w"], values)
    buckets.close()


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_free_memory_is_given_back_when_gradients_are_freed_and_all_else_has_left(
    moves: None, role: str, model_path: str, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wakes next on the device finds it empty: the order of the calls that CUDA has."""
    calls: list[str] = []
    engines: list[Any] = []

    class Recorded(DeviceMemory):
        def pin(self, host: torch.Tensor) -> None:
            calls.append("pin")

        def wait(self) -> None:
            calls.append("wait")

        def give_back(self) -> None:
            for engine in engines:
                kept = any(parameter.grad is not None for parameter in engine.learner.model.parameters())
                left = "gradients" if kept else sorted(engine.residence.on_device)
                calls.append(f"give back, left: {left}")

    monkeypatch.setattr(residence_module, "device_memory", lambda device: Recorded())
    offload = [f"{place}.{part}_offload=true" for place in PLACES[role] for part in ("param", "grad", "optimizer")]
    if role == "actor":
        engine, batch = make_engine(model_path, run_dir, *offload), make_batch()
    else:
        engine, batch = value_engine(write_critic(tmp_path / "critic"), run_dir, *offload), value_batch()
    assert calls == ["pin", "wait"]  # the parameters, once they are loaded
    engines.append(engine)
    calls.clear()
    engine.update(batch)
    assert calls == ["wait", "pin", "wait", "give back, left: []"]  # the optimizer's state is new
    calls.clear()
    engine.update(batch)
    assert calls == ["wait", "wait", "give back, left: []"]


PLACES = {"actor": ["actor_rollout_ref.actor.fsdp_config"], "critic": ["critic.model.fsdp_config"]}


def test_what_only_a_gpu_calls_has_the_arguments_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[Any, ...]]] = []

    def stand_in(owner: Any, name: str) -> None:
        signature = inspect.signature(getattr(owner, name))

        def record(*args: Any) -> None:
            signature.bind(*args)
            asked.append((name, args))

        monkeypatch.setattr(owner, name, record)

    stand_in(torch.cuda, "synchronize")
    stand_in(torch.cuda, "empty_cache")
    monkeypatch.setattr("verl.engine.device.memory.pin_memory", _bound(_pin_memory_utils.pin_memory, asked))
    monkeypatch.setattr("verl.engine.device.memory.unpin_memory", _bound(_pin_memory_utils.unpin_memory, asked))
    device = torch.device("cuda", 0)
    memory = device_memory(device)
    assert isinstance(memory, CudaMemory) and not isinstance(device_memory(CPU), CudaMemory)
    host = torch.empty(10, dtype=torch.uint8)
    address = host.data_ptr()
    memory.pin(host)
    memory.pin(torch.empty(0))  # CUDA refuses an empty range
    memory.wait()
    memory.give_back()
    del host
    expected = [("pin_memory", (address, 10)), ("synchronize", (device,)), ("empty_cache", ())]
    assert asked == [*expected, ("unpin_memory", (address,))]


def _bound(function: Any, asked: list[tuple[str, tuple[Any, ...]]]) -> Any:
    def record(*args: Any) -> None:
        inspect.signature(function).bind(*args)
        asked.append((function.__name__, args))

    return record


def test_the_table_says_for_each_phase_what_is_there() -> None:
    assert RESIDENT.keys() == set(Phase)
    assert Part.KV_CACHE not in RESIDENT[Phase.SYNC]
    trained = {Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER, Part.ANCHOR}
    assert not trained & (RESIDENT[Phase.SAMPLE] | RESIDENT[Phase.SYNC])


def offloaded(model_path: str, run_dir: Path, *overrides: str) -> PolicyEngine:
    return make_engine(model_path, run_dir, *engine_workers.OFFLOAD, *overrides, anchor_path=model_path)
