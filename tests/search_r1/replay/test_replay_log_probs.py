"""Log-probs of stored ids under another checkpoint, against plain Hugging Face forward passes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from replay_world import Replay
from sequences import in_sequences
from transformers import AutoModelForCausalLM

from search_r1.replay.__main__ import main
from search_r1.replay.log_probs import difference
from verl.protocol import Segment, Source, Trajectory
from verl.tracking.trajectory_store import load_trajectories


def reference(model: Path, ids: list[int], dtype: torch.dtype, temperature: float = 1.0) -> torch.Tensor:
    """[L] log-prob of each id given those before it; 0 for the first. One row, no chunks, all logits."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    ids_L = torch.tensor(ids)
    with torch.no_grad():
        log_p_LV = (network(input_ids=ids_L[None]).logits[0] / temperature).log_softmax(-1)
    value_L = log_p_LV[:-1].gather(-1, ids_L[1:, None]).squeeze(-1)
    return torch.cat([value_L.new_zeros(1), value_L])


def with_log_probs(sampled: Trajectory, value_L: torch.Tensor) -> Trajectory:
    """As if a sampler with these log-probs had drawn it."""
    parts = value_L.split([len(segment.ids) for segment in sampled.segments])
    sampled.segments = [
        Segment(s.source, s.ids, tuple(part.tolist()) if s.source is Source.POLICY else None)
        for s, part in zip(sampled.segments, parts, strict=True)
    ]
    return sampled


@pytest.fixture
def sampled(replay: Replay) -> list[Trajectory]:
    """Of three lengths, one of them failed; the log-probs are the model's own."""
    turns = [("<answer> a </answer>",), ("<search> é </search>", "<answer> the river </answer>")]
    made = [replay.trajectory(turns=turn) for turn in turns] + [replay.failed()]
    return [with_log_probs(t, reference(replay.model, t.ids, torch.float32)) for t in made]


@pytest.fixture
def file(replay: Replay, sampled: list[Trajectory]) -> Path:
    """`sampled`, stored."""
    return replay.store(*sampled)


@pytest.fixture(scope="module")
def other_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture and tokenizer, other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_model_dir, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def test_the_same_checkpoint_agrees_with_the_sampler(
    replay: Replay, sampled: list[Trajectory], file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replay.log_probs(file, replay.model, "--device", "cpu", "--max_tokens", "100")
    for trajectory_, values in zip(sampled, found, strict=True):
        assert values == pytest.approx(trajectory_.log_probs, abs=1e-5)
    out = capsys.readouterr().out
    num_tokens = sum(t.num_policy_tokens for t in sampled)
    assert f"{num_tokens} policy tokens of 3 trajectories" in out
    assert float(out.split("largest difference")[1].split()[0]) < 1e-5
    table = pq.read_table(replay.folder / "out.parquet")
    assert table.drop_columns(["log_probs_under"]).equals(pq.read_table(file))
    assert [t.segments for t in load_trajectories(replay.folder / "out.parquet")] == [t.segments for t in sampled]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_another_checkpoint_equals_a_plain_forward(
    replay: Replay,
    sampled: list[Trajectory],
    file: Path,
    other_model: Path,
    capsys: pytest.CaptureFixture[str],
    temperature: float,
) -> None:
    found = replay.log_probs(file, other_model, "--temperature", str(temperature), "--device", "cpu")
    differences = []
    for trajectory_, values in zip(sampled, found, strict=True):
        mask = torch.tensor(trajectory_.loss_mask)
        expected = reference(other_model, trajectory_.ids, torch.float64, temperature)
        assert torch.tensor(values) == pytest.approx(torch.where(mask, expected, 0.0), abs=1e-4)
        differences.append((expected - torch.tensor(trajectory_.log_probs))[mask])
    difference_N = torch.cat(differences)
    assert difference_N.abs().max() > 0.1  # the models do differ
    lines = {line.split("  ")[0]: line.split("  ")[-1].split()[0] for line in capsys.readouterr().out.splitlines()}
    assert float(lines["mean difference of log-probs"]) == pytest.approx(float(difference_N.mean()), abs=1e-5)
    assert float(lines["largest difference"]) == pytest.approx(float(difference_N.abs().max()), abs=1e-4)
    k3_N = difference_N.exp() - 1 - difference_N
    assert k3_N.max() < 10  # where the estimator is cut
    assert float(lines["KL(sampler || model), k3"]) == pytest.approx(float(k3_N.mean()), abs=1e-4)


def test_a_second_checkpoint_replaces_the_first(
    replay: Replay, sampled: list[Trajectory], file: Path, other_model: Path
) -> None:
    first = replay.log_probs(file, other_model)
    second = replay.log_probs(replay.folder / "out.parquet", replay.model)
    assert first[1] != pytest.approx(second[1], abs=0.1)
    assert second[1] == pytest.approx(sampled[1].log_probs, abs=1e-5)


def test_bfloat16_is_near(replay: Replay, sampled: list[Trajectory], file: Path) -> None:
    found = replay.log_probs(file, replay.model, "--dtype", "bfloat16")
    own = torch.tensor([value for t in sampled for value in t.log_probs])
    largest = (torch.tensor([value for row in found for value in row]) - own).abs().max()
    assert 1e-4 < largest < 1.0


def test_difference_by_hand(replay: Replay) -> None:
    two = [replay.trajectory(turns=("a",)), replay.trajectory(turns=((),))]  # sampler: -1 everywhere
    log_probs = [[0.0] * len(t.ids) for t in two]
    log_probs[0][-2:], log_probs[1][-1] = [-1.5, -0.5], -3.0
    found = difference(two, log_probs)
    assert (found.num_tokens, found.max_abs) == (3, 2.0)
    assert found.mean == pytest.approx((-0.5 + 0.5 - 2.0) / 3)
    # k3 of d = sampler - checkpoint: exp(-d) + d - 1
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1, math.exp(-2.0) + 2.0 - 1]
    assert found.kl == pytest.approx(sum(k3) / 3)


def test_bad_models_are_named(
    file: Path, byte_tokenizer: Any, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.parquet"

    def error_of(model: Path, status: int = 2) -> str:
        assert main(["log_probs", str(file), "--model", str(model), "--output", str(output)]) == status
        assert not output.exists()
        return capsys.readouterr().err

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    byte_tokenizer.save_pretrained(tmp_path / "no_model")
    assert "there is no config.json" in error_of(tmp_path / "no_model")
    byte_tokenizer.save_pretrained(tmp_path / "small")
    model.resize_token_embeddings(50)
    model.save_pretrained(tmp_path / "small")
    assert f"{file}: row 0: id " in (error := error_of(tmp_path / "small")) and "none of the 50" in error
    byte_tokenizer.save_pretrained(tmp_path / "damaged")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    torch.nn.init.constant_(model.get_input_embeddings().weight, math.nan)
    model.save_pretrained(tmp_path / "damaged")
    assert "are not finite" in error_of(tmp_path / "damaged", status=1)


@pytest.mark.parametrize("temperature", ["0", "-1", "nan", "inf"])
def test_a_temperature_is_above_0(
    file: Path, replay: Replay, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    """Of another one the log-probs are not finite, which is not the model's fault, or those of the opposite policy."""
    with pytest.raises(SystemExit):
        replay.log_probs(file, replay.model, f"--temperature={temperature}")
    assert f"argument --temperature: {temperature} is not a number above 0" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_before_the_work(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output, reason in ((tmp_path, "is a folder; name a file"), (file / "out.parquet", "its folder takes no files")):
        assert main(["log_probs", str(file), "--model", str(tmp_path / "missing"), "--output", str(output)]) == 2
        assert f"--output {output}" in (error := capsys.readouterr().err) and reason in error


def test_without_policy_tokens_there_is_nothing_to_compare(replay: Replay, capsys: pytest.CaptureFixture[str]) -> None:
    empty = replay.failed()
    empty.segments = empty.segments[:1]
    file, output = replay.store(empty), replay.folder / "out.parquet"
    assert main(["log_probs", str(file), "--model", str(replay.model), "--output", str(output)]) == 2
    assert "have no policy tokens" in capsys.readouterr().err


@pytest.mark.parametrize("max_tokens", ["100", "16384"])
def test_a_token_is_predicted_from_its_own_sequence(
    replay: Replay, sampled: list[Trajectory], other_model: Path, capsys: pytest.CaptureFixture[str], max_tokens: str
) -> None:
    """By a plain pass for each sequence; a context that repeats all before it changes no log-prob."""
    whole = sampled[1]
    cut = in_sequences(whole, 3)
    short = in_sequences(whole, 3)
    short.segments[3] = Segment(Source.CONTEXT, whole.segments[0].ids)
    found = replay.log_probs(replay.store(cut, short, whole), other_model, "--max_tokens", max_tokens)
    assert "of 3 trajectories" in capsys.readouterr().out
    for trajectory_, values in zip((cut, short), found, strict=False):
        parts = [[token for segment in one for token in segment.ids] for one in trajectory_.sequences]
        expected = torch.cat([reference(other_model, ids, torch.float64) for ids in parts])
        assert torch.tensor(values) == pytest.approx(
            torch.where(torch.tensor(trajectory_.loss_mask), expected, 0.0), abs=1e-4
        )
    policy = [[value for value in values if value] for values in found]
    assert policy[0] == pytest.approx(policy[2], abs=1e-5) and policy[1] != pytest.approx(policy[2], abs=1e-2)
