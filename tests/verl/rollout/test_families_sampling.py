"""Each family of docs/models.md in vLLM on a CPU: it samples with the trainer's log-probs, before and after a sync."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, write_family
from weight_source import stream_of

from tests.verl.rollout.conftest import EngineSession
from verl.engine.hf_model import weights_of
from verl.errors import RolloutError

MAX_ERROR = 2e-5
PROMPTS = [list(range(5, 5 + length)) for length in (3, 5, 17, 40, 70)]
SAMPLED = [name for name, family in FAMILIES.items() if family.sampled]
REFUSED = [name for name, family in FAMILIES.items() if not family.sampled]
IN_DEFAULT_TIER = ("Qwen3-MoE",)  # other tests sample with Qwen2.5's


def slow_but(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in IN_DEFAULT_TIER else pytest.mark.slow) for name in names]


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # not pytest's, whose path is too long for a socket
        yield Path(folder)


@torch.no_grad()
def largest_error(session: EngineSession, model: Any) -> float:
    """Of the sampler's log-probs, against the trainer's model."""
    errors: list[float] = []
    for prompt in PROMPTS:
        made = session.generate(prompt, max_tokens=24, seed=len(prompt))
        logits_LV = model(torch.tensor([[*prompt, *made.ids]])).logits[0, len(prompt) - 1 : -1]
        found = logits_LV.log_softmax(-1).gather(1, torch.tensor(made.ids)[:, None])[:, 0]
        errors += (found - torch.tensor(made.log_probs)).abs().tolist()
    assert len(errors) > 20
    return max(errors)


@pytest.mark.parametrize("name", slow_but(SAMPLED))
def test_samples_with_the_trainers_log_probs(
    name: str, tmp_path: Path, temporary: Path, weight_dir: Path, byte_tokenizer: Any
) -> None:
    model = write_family(name, tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    other = write_family(name, tmp_path / "other", seed=1)
    with closing(EngineSession(tmp_path, temporary)) as session:
        assert largest_error(session, model) < MAX_ERROR
        assert largest_error(session, other) > 1000 * MAX_ERROR
        for version in (1, 2):  # a reload is not what the next one begins with
            session.load(stream_of(weights_of(other), version, weight_dir, bucket_mib=0.05))
            assert largest_error(session, other) < MAX_ERROR


@pytest.mark.parametrize("name", slow_but(REFUSED))
def test_an_engine_that_cannot_sample_on_a_cpu_does_not_start(
    name: str, tmp_path: Path, temporary: Path, byte_tokenizer: Any
) -> None:
    write_family(name, tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match="did not start"):
        EngineSession(tmp_path, temporary)
