"""The warm start as a training: it resumes bit by bit, measures rows that are held out, and keeps the best model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from forked import run_forked
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from word_model import make_word_model

from verl.config.loading.run import load_sft_config
from verl.data.sft_rows import read_rows, tokenise
from verl.errors import CheckpointError, ConfigError, DataError
from verl.pretrained import load_tokenizer
from verl.process.ranks import RENDEZVOUS
from verl.run import saved_state
from verl.run.last_checkpoint import best_checkpoint, last_checkpoint
from verl.run.run_folder import LOCK, run_lock
from verl.trainer.sft import WarmStart, main, run

LETTERS = "abcd"


@pytest.fixture(scope="module")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_word_model(tmp_path_factory.mktemp("word_model")))


SEGMENTS = pa.list_(pa.struct([("source", pa.string()), ("text", pa.string())]))


def write_rows(path: Path, shift: int, phase: str | None = None) -> Path:
    """The answer is the letter `shift` places after the one that is asked for."""
    rows = [
        [{"source": "prompt", "text": f"who is {asked}"}, {"source": "policy", "text": f"answer {after} ."}]
        for place, asked in enumerate(LETTERS)
        for after in [LETTERS[(place + shift) % 4]]
    ]
    columns = {"segments": pa.array(rows * 3, SEGMENTS)} | ({"phase": [phase] * 12} if phase else {})
    pq.write_table(pa.table(columns), path)
    return path


def words_of(model: str, folder: Path, *more: str) -> list[str]:
    return [
        *(f"model.path={model}", f"data.train_files={folder / 'rows.parquet'}", "data.train_batch_size=4"),
        *(f"trainer.default_local_dir={folder / 'run'}", "trainer.device=cpu", "trainer.num_threads=1"),
        *("optim.lr=1e-2", "trainer.total_training_steps=8", *more),
    ]


def warm_start(rank: int, folder: Path, words: list[str], num_ranks: int, killed_after: int | None) -> None:
    """All in one process a rank; `killed_after` that step is in the metrics, the processes end without a word."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), RENDEZVOUS: f"file://{folder / 'store'}"}
    log = WarmStart._log

    def log_and_die(self: WarmStart, step: int, *args: object) -> None:
        log(self, step, *args)  # type: ignore[arg-type]
        if step == killed_after:
            os._exit(0)

    WarmStart._log = log_and_die  # type: ignore[method-assign]
    target = run(load_sft_config("sft", words))
    if rank == 0:
        (folder / "result").write_text(str(target))


def ran(folder: Path, words: list[str], num_ranks: int = 1, killed_after: int | None = None) -> Path | None:
    """The model's folder; None if it was killed."""
    for left in ("store", "result"):
        (folder / left).unlink(missing_ok=True)
    run_forked(warm_start, (folder, words, num_ranks, killed_after), num_ranks)
    return None if killed_after else Path((folder / "result").read_text())


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def saved_steps(folder: Path) -> dict[str, list[str]]:
    return {
        kind: sorted(path.name.removeprefix("global_step_") for path in place.glob("global_step_*"))
        for kind, place in (("models", folder / "run"), ("states", folder / "run" / "state"))
    }


def left_by(run_dir: Path) -> dict[Path, bytes]:
    """The files of a run, but for its lock."""
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != LOCK}


def held_out_losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["sft/val_loss"] for row in metrics(folder) if "sft/val_loss" in row}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_was_killed_goes_on_bit_by_bit(word_model: str, tmp_path: Path, num_ranks: int) -> None:
    """It was killed at step 6, after a best model that was saved at step 5 beside the state of step 3."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        write_rows(folder / "rows.parquet", 1)
        write_rows(folder / "held_out.parquet", 1)
    more = ("trainer.save_freq=3", "trainer.test_freq=5", "optim.warmup_style=cosine", "data.lm_fraction=0.5")
    words = {
        folder: words_of(word_model, folder, f"data.val_files={folder / 'held_out.parquet'}", *more)
        for folder in (whole, parts)
    }
    target = ran(whole, words[whole], num_ranks)
    ran(parts, words[parts], num_ranks, killed_after=6)
    assert saved_steps(parts) == {"models": ["3", "5"], "states": ["3"]}
    resumed = ran(parts, [*words[parts], "trainer.resume_mode=auto"], num_ranks)

    assert [row["step"] for row in metrics(parts)] == list(range(9))
    assert metrics(parts) == metrics(whole)
    assert saved_steps(parts) == saved_steps(whole) == {"models": ["3", "6", "8"], "states": ["3", "6", "8"]}
    assert target is not None and resumed is not None and resumed.name == target.name == "global_step_8"
    assert (resumed / "model.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()
    [archived] = (parts / "run" / "archive").iterdir()
    assert (archived / "global_step_5" / "config.json").is_file()

    # There is nothing left to do, and nothing is done twice.
    assert ran(parts, [*words[parts], "trainer.resume_mode=auto"], num_ranks) == resumed
    assert metrics(parts) == metrics(whole)


def test_held_out_loss_is_the_mean_over_policy_tokens_of_a_plain_pass(word_model: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", 1)
    held_out = write_rows(tmp_path / "held_out.parquet", 2)
    words = words_of(word_model, tmp_path, f"data.val_files={held_out}", "data.train_batch_size=5")
    assert ran(tmp_path, words) == tmp_path / "run" / "global_step_8"
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows if "sft/val_loss" in row] == [0, 8]
    for row, path in ((rows[0], Path(word_model)), (rows[-1], tmp_path / "run" / "global_step_8")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        tokenizer = load_tokenizer(str(path), False, "path")
        losses = []
        for one in read_rows(str(held_out)):
            sequence = tokenise(tokenizer, one, "policy", 64)  # type: ignore[arg-type]
            log_probs = model(sequence.ids_L[None]).logits.detach()[0, :-1].log_softmax(-1)
            trained = sequence.loss_mask_L[1:]
            losses.append(-log_probs[trained].gather(1, sequence.ids_L[1:][trained][:, None]))
        assert row["sft/val_loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)


def test_training_ends_when_the_held_out_loss_rises_and_the_best_model_stays(word_model: str, tmp_path: Path) -> None:
    """Held out are other answers: the shape of an answer is learned first, which helps, then the letters, which do
    not."""
    write_rows(tmp_path / "rows.parquet", 1)
    held_out = write_rows(tmp_path / "held_out.parquet", 2)
    more = ("trainer.test_freq=2", "trainer.patience=3", "trainer.total_training_steps=400", "trainer.save_freq=100")
    target = ran(tmp_path, words_of(word_model, tmp_path, f"data.val_files={held_out}", *more))
    losses = held_out_losses(tmp_path)
    best = min((step for step in losses if step), key=lambda step: losses[step])
    last = max(losses)
    assert 0 < best == last - 6 < 90
    assert target == best_checkpoint(tmp_path / "run") == tmp_path / "run" / f"global_step_{best}"
    assert last_checkpoint(tmp_path / "run").name == f"global_step_{last}"
    assert saved_steps(tmp_path) == {"models": sorted([str(best), str(last)]), "states": [str(last)]}
    weights = [
        load_file(path / "model.safetensors")["lm_head.weight"] for path in (target, last_checkpoint(tmp_path / "run"))
    ]
    assert not torch.equal(*weights)

    # A run that has lost patience has ended: resuming it trains no further.
    words = words_of(word_model, tmp_path, f"data.val_files={held_out}", *more, "trainer.resume_mode=auto")
    assert ran(tmp_path, words) == target
    assert max(row["step"] for row in metrics(tmp_path)) == last


def lowest_of(folder: Path, steps: Iterable[int]) -> Path:
    """The checkpoint of these steps with the lowest held-out loss."""
    return folder / "run" / f"global_step_{min(steps, key=held_out_losses(folder).__getitem__)}"


@pytest.mark.parametrize("patience", [(), ("trainer.patience=1",)], ids=["", "patience"])
def test_held_out_losses_compare_only_on_the_same_rows(
    word_model: str, tmp_path: Path, patience: tuple[str, ...]
) -> None:
    """The first ones are of answers that are trained, so that all later ones are higher; resumed twice, the run has
    other rows, and once more those.
    """
    write_rows(tmp_path / "rows.parquet", 1)
    easy, hard = write_rows(tmp_path / "easy.parquet", 1), write_rows(tmp_path / "hard.parquet", 2)
    more = ("trainer.save_freq=2", "trainer.test_freq=2", "trainer.resume_mode=auto")
    words = words_of(word_model, tmp_path, *more, f"data.val_files={easy}")
    ran(tmp_path, [*words, "trainer.total_training_steps=40"])
    assert best_checkpoint(tmp_path / "run") == lowest_of(tmp_path, range(2, 41, 2))

    others = [*words, f"data.val_files={hard}", *patience]
    ran(tmp_path, [*others, "trainer.total_training_steps=44"], killed_after=43)
    target = ran(tmp_path, [*others, "trainer.total_training_steps=44"])
    losses = held_out_losses(tmp_path)
    assert max(losses[step] for step in range(20, 41, 2)) < min(losses[42], losses[44])
    assert target == best_checkpoint(tmp_path / "run") == lowest_of(tmp_path, (42, 44))


def test_without_held_out_rows_the_last_model_counts(word_model: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", 1)
    more = ("trainer.save_freq=2", "trainer.resume_mode=auto")
    words = words_of(word_model, tmp_path, *more)
    ran(tmp_path, [*words, f"data.val_files={write_rows(tmp_path / 'held_out.parquet', 1)}"])
    assert ran(tmp_path, [*words, "trainer.total_training_steps=10"]) == tmp_path / "run" / "global_step_10"
    with pytest.raises(DataError, match="has no validated checkpoint"):
        best_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_resumed_elsewhere_without_a_step_left_has_the_model(
    word_model: str, tmp_path: Path, num_ranks: int
) -> None:
    """As one that only continues a finished run in a folder of its own, by the same number of steps."""
    write_rows(tmp_path / "rows.parquet", 1)
    words = words_of(word_model, tmp_path, "trainer.save_freq=2", "trainer.total_training_steps=2")
    first = ran(tmp_path, words)
    state = saved_state.state_path(tmp_path / "run", 2)
    again = [*words, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={state}"]
    again += [f"trainer.default_local_dir={tmp_path / 'other'}"]
    model = ran(tmp_path, again, num_ranks)
    assert first is not None and model == tmp_path / "other" / "global_step_2"
    saved = [load_file(folder / "model.safetensors") for folder in (first, model)]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert saved_state.state_path(tmp_path / "other", 2).is_dir()


def test_steps_that_are_done_stay_of_their_phase(word_model: str, tmp_path: Path) -> None:
    """4 of 8 steps are lm; state 2 is of these, and state 6 of the others."""
    write_rows(tmp_path / "rows.parquet", 1)
    words = words_of(word_model, tmp_path, "data.lm_fraction=0.5", "trainer.save_freq=2")
    ran(tmp_path, words, killed_after=7)
    more = [*words, "trainer.resume_mode=auto", "trainer.total_training_steps=16"]
    before = left_by(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"8 steps of phase lm, but .*step_6 is .* with 4; set data.lm_fraction=0.25"):
        run(load_sft_config("sft", more))
    assert left_by(tmp_path / "run") == before
    ran(tmp_path, [*more, "data.lm_fraction=0.25"])
    assert [row["sft/lm_phase"] for row in metrics(tmp_path)] == [1.0] * 4 + [0.0] * 12

    state = f"trainer.resume_from_path={saved_state.state_path(tmp_path / 'run', 2)}"
    ran(tmp_path, [*more, "trainer.resume_mode=resume_path", state])
    assert [row["sft/lm_phase"] for row in metrics(tmp_path)] == [1.0] * 8 + [0.0] * 8


def test_checkpoints_rotate(word_model: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", 1)
    ran(tmp_path, words_of(word_model, tmp_path, "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2"))
    assert saved_steps(tmp_path) == {"models": ["6", "8"], "states": ["6", "8"]}


def test_what_a_resumed_run_cannot_go_on_with_is_said(word_model: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", 1)
    words = words_of(word_model, tmp_path, "trainer.save_freq=2", "trainer.total_training_steps=4")
    ran(tmp_path, words, killed_after=3)
    again = [*words, "trainer.resume_mode=auto", "trainer.total_training_steps=6"]
    before = left_by(tmp_path / "run")
    write_rows(rows, 2)
    with pytest.raises(DataError, match="not the rows that .*global_step_2 was trained on"):
        run(load_sft_config("sft", again))
    assert left_by(tmp_path / "run") == before
    write_rows(rows, 1)
    before = left_by(tmp_path / "run")
    with pytest.raises(CheckpointError, match="global_step_2/model cannot be loaded: it has no base.json"):
        run(load_sft_config("sft", [*again, "model.lora_rank=2"]))
    assert left_by(tmp_path / "run") == before
    path = saved_state.state_path(tmp_path / "rl", 2)
    saved_state.finish(saved_state.begin(path, ["actor"], {"step": 2}), path, {})
    of_rl = [*words, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    of_rl += [f"trainer.default_local_dir={tmp_path / 'new'}"]
    with pytest.raises(CheckpointError, match="global_step_2 has no model: it belongs to a run with other roles"):
        run(load_sft_config("sft", of_rl))
    assert left_by(tmp_path / "new") == {}
    shutil.rmtree(tmp_path / "run" / "state" / "global_step_2" / "model")
    write_rows(rows, 1)
    assert main(again) == 1  # no state that can be used


def test_ranks_of_torchrun_leave_the_look_at_the_folder_to_the_first(
    word_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may come when the first has locked the folder for all."""
    monkeypatch.setenv("RANK", "1")
    config = load_sft_config("sft", words_of(word_model, tmp_path))
    with run_lock(tmp_path / "run"), pytest.raises(DataError, match=r"rows\.parquet: no such file"):
        run(config)


def test_settings_that_need_held_out_rows_are_refused_without_them(word_model: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", 1)
    for key in ("trainer.patience=2", "trainer.test_freq=2"):
        with pytest.raises(ConfigError, match=r"set data\.val_files, or leave them out"):
            run(load_sft_config("sft", words_of(word_model, tmp_path, key)))
    held_out = f"data.val_files={rows}"
    with pytest.raises(ConfigError, match=r"trainer.patience=2 has no effect with trainer.test_freq=-1"):
        run(load_sft_config("sft", words_of(word_model, tmp_path, held_out, "trainer.patience=2")))
    with pytest.raises(DataError, match=r"data\.val_files: no rows in no file at all"):
        run(load_sft_config("sft", words_of(word_model, tmp_path, "data.val_files=[]")))
    write_rows(rows.with_name("lm.parquet"), 1, "lm")
    lm_only = f"data.val_files={rows.with_name('lm.parquet')}"
    with pytest.raises(DataError, match=r"data\.val_files: no row has phase 'policy'"):
        run(load_sft_config("sft", words_of(word_model, tmp_path, lm_only)))
    assert not list(tmp_path.glob("run/metrics.jsonl"))
