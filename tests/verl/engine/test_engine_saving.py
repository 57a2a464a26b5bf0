"""Models and states on disk: a round trip, a full disk, going on with the same bits, damage, and their size."""

from __future__ import annotations

import json
import resource
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
from engine_cases import CPU, VOCABULARY, make_batch, make_config, make_engine
from engine_state import assert_same_weights, full_state, save_state
from engine_workers import KL
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from value_cases import value_batch

from verl.engine.device.runtime import init_process_group
from verl.engine.device.sharding import RowShards, local
from verl.engine.files.saving import save_model
from verl.engine.files.slices import Entry, stream, write_safetensors
from verl.engine.policy_engine import PolicyEngine
from verl.engine.value_engine import ValueEngine
from verl.errors import CheckpointError
from verl.process.storage import digest
from verl.trainer.start_checks.models import models_of
from verl.trainer.start_checks.resources import checkpoint_bytes


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "<unk>": 1}, "<unk>")))


def test_round_trip(model_path: str, run_dir: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = make_engine(model_path, run_dir, with_anchor=True)
    batch = make_batch()
    engine.update(batch)
    target = run_dir / "actor" / "global_step_1"
    engine.save_pretrained(target, tokenizer)
    state = full_state(engine)
    assert "lm_head.weight" not in state
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, state[name])
    again = make_engine(str(target), run_dir)
    assert torch.equal(again.log_probs(batch, 1.0).tokens["log_prob"], engine.log_probs(batch, 1.0).tokens["log_prob"])
    assert PreTrainedTokenizerFast.from_pretrained(target).get_vocab() == {"a": 0, "<unk>": 1}
    engine.save_pretrained(run_dir / "ref" / "global_step_1", tokenizer, of="anchor")
    anchor = AutoModelForCausalLM.from_pretrained(run_dir / "ref" / "global_step_1", dtype=torch.float32)
    assert torch.equal(anchor.model.norm.weight, full_state(engine, "anchor")["model.norm.weight"])
    assert not torch.equal(anchor.model.norm.weight, loaded.model.norm.weight)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("generation_config.json", {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 0}),
        ("generation_config.json", {"do_sample": False, "temperature": 0.1, "eos_token_id": [0, 1]}),
        ("generation_config.json", {"num_beams": 1, "length_penalty": 2.0, "early_stopping": True, "eos_token_id": 1}),
        ("generation_config.json", {"top_k": 7, "do_sample": True, "eos_token_id": 1}),
        ("config.json", {"temperature": 0.6, "top_p": 0.9}),
        ("config.json", {"max_length": 50, "repetition_penalty": 1.1, "num_beams": 2, "eos_token_id": [3, 4]}),
        ("config.json", {"task_specific_params": {"x": 1}, "a_key_of_theirs": [1]}),
    ],
)
def test_configs_are_saved_as_they_were_loaded(
    file: str, values: dict[str, Any], model_path: str, run_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Of some of them transformers says at a save that they have to be changed first."""
    folder = Path(shutil.copytree(model_path, run_dir / "model"))
    (folder / "generation_config.json").unlink()
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | values))
    for number in range(2):
        saved = run_dir / str(number)
        make_engine(str(folder), run_dir).save_pretrained(saved, tokenizer)
        loaded, again = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, saved))
        expected, found = (model.generation_config.to_diff_dict() for model in (loaded, again))
        assert found | {"_from_model_config": None} == expected | {"_from_model_config": None}
        kept = {name: value for name, value in values.items() if "params" not in name and name != "a_key_of_theirs"}
        assert {name: found.get(name) for name in kept} == kept
        assert again.config.to_diff_dict() == loaded.config.to_diff_dict()
        folder = saved


def test_several_files(model_path: str, run_dir: Path) -> None:
    engine = make_engine(model_path, run_dir)
    save_model(engine.policy, run_dir / "model", None, max_file_bytes=20_000)
    files = sorted(run_dir.glob("model/model-*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    loaded = AutoModelForCausalLM.from_pretrained(run_dir / "model", dtype=torch.float32)
    state = full_state(engine)
    assert all(torch.equal(parameter, state[name]) for name, parameter in loaded.named_parameters())


def test_a_stream_of_any_number_formats_is_a_safetensors_file(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.int64).view(3, 2),
        "a/x": torch.randn(5, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "t": torch.randn(4, 6, dtype=torch.bfloat16).T,
        "flags": torch.tensor([True, False, True]),
    }
    entries = [Entry(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    parts = stream([*tensors.values(), torch.ones(2)])
    write_safetensors(tmp_path / "file", entries, parts)
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    assert torch.equal(next(parts), torch.ones(2)), "the stream goes on for the next file"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_of_several_ranks_are_sent_in_batches(num_ranks: int, tmp_path: Path) -> None:
    """For a send or receive by itself NCCL would make a communicator of its two ranks. A batch is of one weight, in the
    order of its rows; the second of the three has fewer rows than there are ranks.
    """
    first, *others = engine_workers.run(tmp_path, "", "", num_ranks, engine_workers.stream_shards)
    assert first["right"] and first["alone"] == {}
    peers = num_ranks - 1
    assert first["batches"] == [["irecv"] * peers, ["irecv"], ["irecv"] * peers]
    assert [other["batches"] for other in others] == [
        [["isend"]] * (3 if rank == 1 else 2) for rank in range(1, num_ranks)
    ]
    assert all(other["alone"] == {} and other["right"] is None for other in others)


def test_a_batch_of_shards_is_bounded(tmp_path: Path) -> None:
    """48 bytes are one shard of 4 rows of the first weight, and all shards of the last one, of 8 bytes each."""
    task = partial(engine_workers.stream_shards, batch_bytes=48)
    first, *_ = engine_workers.run(tmp_path, "", "", 4, task)
    assert first["right"] and first["batches"] == [["irecv"]] * 4 + [["irecv"] * 3]


def test_of_two_copies_one_is_sent(tmp_path: Path) -> None:
    """Hybrid sharding: ranks 2 and 3 have what 0 and 1 have."""
    first, *others = engine_workers.run(tmp_path, "", "", 4, partial(engine_workers.stream_shards, fsdp_size=2))
    assert first["right"] and first["batches"] == [["irecv"]] * 3
    assert [len(other["batches"]) for other in others] == [3, 0, 0]


def test_a_group_on_gpus_is_bound_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that NCCL connects all ranks once, at the start, and not first in a batch that only some of them join."""
    device, given = torch.device("cuda", 1), {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: given.update(options))
    init_process_group(0, 2, "file:///nowhere", device)
    assert given["device_id"] == device
    init_process_group(0, 2, "file:///nowhere", CPU)
    assert given["device_id"] is None


def test_an_older_checkpoint_of_that_name_is_replaced(model_path: str, run_dir: Path) -> None:
    engine = make_engine(model_path, run_dir)
    target = run_dir / "model"
    engine.save_pretrained(target, None)
    (target / "left_over").write_text("old")
    engine.update(make_batch())
    engine.save_pretrained(target, None)
    assert not (target / "left_over").exists()
    assert [path.name for path in run_dir.iterdir()] == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert torch.equal(loaded.model.norm.weight, full_state(engine)["model.norm.weight"])


def test_a_full_disk_leaves_the_older_checkpoint(model_path: str, run_dir: Path) -> None:
    engine = make_engine(model_path, run_dir)
    target = run_dir / "model"
    engine.save_pretrained(target, None)
    before = (target / "model.safetensors").read_bytes()
    engine.update(make_batch())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))  # no file may grow beyond this
    try:
        with pytest.raises(CheckpointError, match="model could not be written: .*check the disk"):
            engine.save_pretrained(target, None)
        with pytest.raises(CheckpointError):
            engine.save_pretrained(run_dir / "new", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in run_dir.iterdir()] == ["model"]
    engine.save_pretrained(run_dir / "new", None)
    AutoModelForCausalLM.from_pretrained(run_dir / "new")


def make(model_path: str, other_model_path: str, run_dir: Path) -> PolicyEngine:
    return make_engine(model_path, run_dir, *KL, anchor_path=other_model_path)


def train(engine: PolicyEngine, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        metrics.append(engine.update(make_batch(seed=step)))
        engine.follow_anchor(0.9)
    return metrics


def assert_same(one: PolicyEngine, other: PolicyEngine) -> None:
    assert_same_weights(one, other)
    optimizers = one.resumable._optimizer_state(), other.resumable._optimizer_state()
    assert optimizers[0].keys() == optimizers[1].keys() and optimizers[0]
    assert all(torch.equal(local(tensor), local(optimizers[1][name])) for name, tensor in optimizers[0].items())


def test_going_on_gives_the_same_bits(model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path) -> None:
    straight = make(model_path, other_model_path, run_dir)
    train(straight, range(3))
    straight.lr_factor = 0.5
    (tmp_path / "state").mkdir()
    straight.start_saving_state(tmp_path / "state")
    expected = train(straight, range(3, 6))  # while the files are written
    digests = straight.resumable.saved()
    assert digests and {name: digest(tmp_path / "state" / name) for name in digests} == digests
    assert digests.keys() == {path.name for path in (tmp_path / "state").iterdir()}
    broken = make(model_path, other_model_path, run_dir)
    broken.load_state(tmp_path / "state")
    assert (broken.step, broken.lr_factor) == (3, 0.5)
    assert train(broken, range(3, 6)) == expected
    assert_same(broken, straight)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 6, 13])
def test_the_rows_of_a_shard_are_those_that_torch_chunk_gives(num_rows: int, num_ranks: int) -> None:
    """With torch.chunk some of the last ranks may have fewer rows than the others, or none."""
    weight = torch.arange(num_rows * 3).view(num_rows, 3)
    chunks = list(weight.chunk(num_ranks)) if num_rows else []
    chunks += [weight[:0]] * (num_ranks - len(chunks))
    for place, chunk in enumerate(chunks):
        shards = RowShards(weight, [list(range(num_ranks))], 0, place)  # type: ignore[arg-type]
        assert torch.equal(weight[shards.rows_at(place)], chunk)
        assert torch.equal(weight.flatten()[shards.values], chunk.flatten())


def test_a_state_before_the_first_step(model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path) -> None:
    straight = make(model_path, other_model_path, run_dir)
    save_state(straight, tmp_path)
    broken = make(other_model_path, model_path, run_dir)
    train(broken, range(2))  # an optimizer that was used is as good as new afterwards
    broken.load_state(tmp_path)
    assert train(broken, range(2)) == train(straight, range(2))
    assert_same(broken, straight)


@pytest.fixture(scope="module")
def trained(
    model_path: str, other_model_path: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PolicyEngine, Path]:
    """An engine and its state after a step."""
    folder = tmp_path_factory.mktemp("trained")
    engine = make(model_path, other_model_path, folder)
    train(engine, range(1))
    return engine, save_state(engine, folder / "state")


def test_random_numbers_go_on(trained: tuple[PolicyEngine, Path], tmp_path: Path) -> None:
    engine, _ = trained
    save_state(engine, tmp_path)
    drawn = torch.rand(3)
    engine.load_state(tmp_path)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("harm", ["cut", "gone", "no_metadata", "without_anchor"])
def test_a_damaged_state_is_named(
    trained: tuple[PolicyEngine, Path], model_path: str, tmp_path: Path, harm: str
) -> None:
    engine, state = trained
    folder = tmp_path / "state"
    if harm == "without_anchor":
        other = make_engine(model_path, tmp_path)
        other.load_state(state)  # what it asks for is there
        save_state(other, folder)
    else:
        data = next(shutil.copytree(state, folder).glob("__0_*"))
        if harm == "cut":
            data.write_bytes(data.read_bytes()[:1000])
        else:
            (data if harm == "gone" else folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=str(folder)):
        engine.load_state(folder)


def test_a_state_of_other_settings_is_told_in_one_line(
    trained: tuple[PolicyEngine, Path], model_path: str, other_model_path: str, run_dir: Path, tmp_path: Path
) -> None:
    engine, state = trained
    save_state(make_engine(model_path, run_dir), tmp_path / "alone")
    of_few = "actor_rollout_ref.model.trained_layers=1"
    few = make_engine(model_path, run_dir, *KL, of_few, anchor_path=other_model_path)
    few.load_state(state)  # the moments of what is not trained any more are left out
    save_state(few, tmp_path / "few")
    for name, lacks in (("alone", r"anchor\.\S+"), ("few", r"optimizer\.\S+")):
        with pytest.raises(CheckpointError, match=rf"cannot be loaded: it has no {lacks}: resume with .*; or ") as told:
            engine.load_state(tmp_path / name)
        assert "\n" not in str(told.value)


def test_a_failed_write_is_told(trained: tuple[PolicyEngine, Path], tmp_path: Path) -> None:
    engine, _ = trained
    (tmp_path / "file").write_text("in the way")
    engine.start_saving_state(tmp_path / "file")
    for _ in range(2):  # whoever asks again is told again: the state must not pass for a saved one
        with pytest.raises(CheckpointError, match="file could not be written"):
            engine.resumable.saved()
    (tmp_path / "state").mkdir()
    engine.start_saving_state(tmp_path / "state")
    assert engine.resumable.saved() == engine.resumable.saved() != {}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """Of 0.9 million parameters, so that the headers of tensors do not count."""
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=128, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("tau", [0.9, 1.0], ids=["anchor_moves", "anchor_stays"])
def test_a_checkpoint_is_as_large_as_was_said(tau: float, model_dir: str, run_dir: Path) -> None:
    settings = (f"critic.model.path={model_dir}", f"algorithm.ref_policy_ema_tau={tau}")
    config = make_config(model_dir, run_dir, *settings)
    policy, critic = PolicyEngine(config, CPU, 10, with_anchor=True), ValueEngine(config, CPU, 10)
    policy.update(make_batch())
    critic.update(value_batch())
    for engine, role in ((policy, "actor"), (critic, "critic")):
        engine.save_pretrained(run_dir / role, None)
        save_state(engine, run_dir / f"{role}_state")
    if tau < 1:
        policy.save_pretrained(run_dir / "ref", None, of="anchor")
    expected, count = checkpoint_bytes(config, models_of(config), steps=1)
    assert count == 1
    assert size_of(run_dir) == pytest.approx(expected, rel=0.02)
