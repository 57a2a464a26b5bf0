"""A model of random weights: what is written loads, each id of its vocabulary is text, and memory stays small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts" / "gpu"))
import random_model  # noqa: E402
from shapes import SHAPES  # noqa: E402

PUBLISHED = ROOT / "tests" / "verl" / "trainer" / "shapes"
DRAWING = """
import resource, torch
from random_model import Entry, random_values
parts = random_values([Entry("weight", torch.bfloat16, torch.Size([2**14, 2**13]))], torch.device("cpu"), 0)
first = next(parts).nbytes
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(first + sum(part.nbytes for part in parts), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_model_that_loads(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "MAX_FILE_BYTES", 2**17)  # so that there are several files
    monkeypatch.setattr(random_model, "VALUES_AT_ONCE", 1000)
    count = random_model.write_model(tmp_path, "tiny", tiny_model_dir, torch.device("cpu"))
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype="auto")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype is torch.bfloat16 and model.num_parameters() == count
    embedding, norm = model.model.embed_tokens.weight.float(), model.model.norm.weight
    assert len(embedding) == SHAPES["tiny"]["vocab_size"] and (norm == 1).all()
    assert abs(embedding.std().item() - 0.02) < 5e-4 and not model.model.layers[0].self_attn.q_proj.bias.any()
    assert not torch.equal(embedding.flatten()[:1000], embedding.flatten()[1000:2000]), "each part is drawn anew"
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1


def test_every_id_is_text_and_text_is_cut_as_before(tiny_model_dir: Path) -> None:
    before = AutoTokenizer.from_pretrained(tiny_model_dir)
    filled = random_model.fill_up(before, 1536)
    text = "<search> the river </search> filler7 \u00e9"
    assert filled(text).input_ids == before(text).input_ids and len(filled) == 1536
    assert (filled.eos_token_id, filled.pad_token_id) == (before.eos_token_id, before.pad_token_id)
    assert all(filled.decode([number]) for number in range(len(before), 1536))


@pytest.mark.parametrize("name, folder", [("3b", "Qwen2.5-3B"), ("7b", "Qwen2.5-7B")])
def test_shapes_are_the_published_ones(name: str, folder: str) -> None:
    config = json.loads((PUBLISHED / folder / "config.json").read_text())
    for key, value in SHAPES[name].items():
        assert config[key] == value or key == "max_position_embeddings", key


def test_memory_does_not_grow_with_the_model() -> None:
    """256 MiB of values pass through; the process holds a part of 32 MiB, or two."""
    command = [sys.executable, "-c", DRAWING]
    done = subprocess.run(command, cwd=ROOT / "scripts" / "gpu", capture_output=True, text=True, check=True)
    num_bytes, grown_kib = map(int, done.stdout.split())
    assert num_bytes == 2**28 and grown_kib < 100 * 1024
