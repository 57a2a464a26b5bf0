"""Checkpoints: a round trip, several files, replacing, and a disk that is full."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from engine_cases import make_batch, make_engine
from engine_state import full_state
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from verl.engine.saving import save_model
from verl.engine.streaming import Entry, stream, write_safetensors
from verl.errors import CheckpointError


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
