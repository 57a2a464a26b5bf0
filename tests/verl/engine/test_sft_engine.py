"""The supervised step against plain Hugging Face training, and the command from file to saved model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from engine_cases import CPU, make_batch
from forked import run_forked
from format_models import MADE, made
from transformers import AutoModelForCausalLM, Olmo2Config, Olmo2ForCausalLM
from word_model import WORDS, make_word_model

from verl.config.loading.run import load_sft_config
from verl.config.sections.schema import SftConfig
from verl.data.sft_rows import Batches, Row, read_rows, tokenise
from verl.engine.sft_engine import SftEngine
from verl.errors import ConfigError, DataError
from verl.pretrained import load_tokenizer
from verl.trainer.sft import main, run

FIELDS = [("source", pa.string()), ("text", pa.string())]
SEGMENTS = pa.list_(pa.struct(FIELDS))
WITH_IDS = pa.list_(pa.struct([*FIELDS, ("ids", pa.list_(pa.int32()))]))


def sft_config(model_path: str, folder: Path, *overrides: str) -> SftConfig:
    return load_sft_config(
        "sft", [f"model.path={model_path}", f"trainer.default_local_dir={folder}", "trainer.device=cpu", *overrides]
    )


def write_rows(path: Path, phases: bool = True) -> Path:
    """In phase policy the answer is the letter after the one asked for; in phase lm it is what the documents say."""
    rows, phase_names = [], []
    letters = ["a", "b", "c", "d"]
    for i in range(16):
        asked, follows = letters[i % 4], letters[(i + 1) % 4]
        rows.append(
            [
                {"source": "prompt", "text": f"who is {asked}"},
                {"source": "policy", "text": f"search {asked}"},
                {"source": "environment", "text": "docs . . ."},
                {"source": "policy", "text": f"answer {follows}"},
            ]
        )
        phase_names.append("lm" if i < 8 else "policy")
    columns = {"segments": pa.array(rows, SEGMENTS)} | ({"phase": phase_names} if phases else {})
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_word_model(tmp_path_factory.mktemp("word_model")))


def test_loss_and_step_equal_plain_training(model_path: str, tmp_path: Path) -> None:
    batch = make_batch()
    limits = ["trainer.max_token_len_per_gpu=60", "trainer.head_chunk_tokens=5", "trainer.grad_clip=100"]
    engine = SftEngine(sft_config(model_path, tmp_path, "optim.lr=1e-3", *limits), CPU)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    labels_BL = batch.padded("ids").masked_fill(~batch.padded("loss_mask", False).bool(), -100)
    for _ in range(3):
        loss = model(input_ids=batch.padded("ids"), labels=labels_BL).loss  # mean over the labels of all rows
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.step(batch)["loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_masks_of_the_two_phases(word_model: str) -> None:
    tokenizer = load_tokenizer(word_model, False, "path")
    row = Row(("prompt", "policy", "environment", "policy"), ("who is a", "search", "docs .", "answer b"), None, "x")
    policy = tokenise(tokenizer, row, "policy", 100)
    assert policy.ids_L.tolist() == [1, 2, 3, 7, 9, 10, 8, 4]
    assert policy.loss_mask_L.tolist() == [False, False, False, True, False, False, True, True]
    assert tokenise(tokenizer, row, "lm", 100).loss_mask_L.tolist() == [False] + [True] * 7
    with pytest.raises(DataError, match="x: 8 tokens are more than data.max_length=7"):
        tokenise(tokenizer, row, "lm", 7)
    with pytest.raises(DataError, match="nothing to train on in phase 'policy'"):
        tokenise(tokenizer, Row(("prompt",), ("who is",), None, "x"), "policy", 100)


def test_ids_are_trained_as_they_are_given(word_model: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(word_model, False, "path")
    sampled = [
        {"source": "prompt", "text": "who is", "ids": [1, 2]},
        {"source": "policy", "text": "<unk> a", "ids": [0, 3]},
    ]
    text_only = [{"source": "prompt", "text": "who is"}, {"source": "policy", "text": "a b"}]
    pq.write_table(pa.table({"segments": pa.array([sampled, text_only], WITH_IDS)}), tmp_path / "rows.parquet")
    first, second = (tokenise(tokenizer, row, "policy", 9) for row in read_rows(str(tmp_path / "rows.parquet")))
    assert first.ids_L.tolist() == [1, 2, 0, 3]
    assert first.loss_mask_L.tolist() == [False, False, True, True]
    assert second.ids_L.tolist() == [1, 2, 3, 4]
    bad = Row(("policy",), ("a b",), None, "x: row 7", ids=((3, 5),))
    with pytest.raises(
        DataError, match="x: row 7, column 'segments': the tokenizer is not the one that wrote these ids"
    ):
        tokenise(tokenizer, bad, "policy", 9)


def test_phases_rows_and_order(word_model: str, tmp_path: Path) -> None:
    rows = read_rows(str(write_rows(tmp_path / "rows.parquet")))
    settings = ["data.lm_fraction=0.5", "data.train_batch_size=4", "trainer.total_training_steps=8", "trainer.seed=1"]
    tokenizer = load_tokenizer(word_model, False, "path")
    first, second = (Batches(sft_config(word_model, tmp_path, *settings), tokenizer, rows) for _ in range(2))
    drawn = [first.next(step) for step in range(8)]
    again = [second.next(step) for step in range(8)]
    assert [phase for phase, _ in drawn] == ["lm"] * 4 + ["policy"] * 4
    for (_, one), (_, two) in zip(drawn, again, strict=True):
        assert torch.equal(one.tokens["ids"], two.tokens["ids"])
    first.check_ids(len(WORDS))
    with pytest.raises(DataError, match=rf"rows.parquet: row \d+: it has token \d+, but .* for 0 to {len(WORDS) - 2}"):
        first.check_ids(len(WORDS) - 1)
    # 4 steps of 4 rows are 2 passes over the 8 rows of a phase: each letter is asked for 2 * 2 times
    asked = torch.cat([batch.tokens["ids"].view(4, -1)[:, 2] for phase, batch in drawn if phase == "policy"])
    assert torch.bincount(asked, minlength=7)[3:7].tolist() == [4, 4, 4, 4]


def command(rank: int, folder: Path, words: list[str]) -> None:
    """With its output and its status in files of the folder."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    (folder / "status").write_text(str(main(words)))
    sys.stdout.flush()


def test_the_command_trains_and_saves(word_model: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.parquet")
    words = [
        *(f"data.train_files={file}", f"model.path={word_model}", f"trainer.default_local_dir={tmp_path / 'run'}"),
        *("trainer.total_training_steps=60", "optim.lr=1e-2", "data.lm_fraction=0.5", "data.train_batch_size=8"),
        *("trainer.device=cpu", "trainer.num_threads=1"),
    ]
    run_forked(command, (tmp_path, words), 1)
    stdout, stderr, status = ((tmp_path / name).read_text() for name in ("stdout", "stderr", "status"))
    assert status == "0", stderr
    target = tmp_path / "run" / "global_step_60"
    assert stdout.strip().splitlines()[-1] == f"model: {target}"
    assert "it/s" not in stderr.split("step 20/60")[1]  # no progress bar in a log file
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 61))
    assert records[0]["sft/loss"] == pytest.approx(math.log(len(WORDS)), abs=0.2)
    assert records[-1]["sft/loss"] < 0.05
    assert [record["sft/lm_phase"] for record in records] == [1.0] * 30 + [0.0] * 30
    model = AutoModelForCausalLM.from_pretrained(target)
    tokenizer = load_tokenizer(str(target), False, "path")
    ids = tokenizer("who is c search c docs . . . answer", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == "d"


def test_conversations_with_tool_calls_are_learned(tmp_path: Path) -> None:
    tokenizer = made(*MADE["trimming"])
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = Olmo2Config(vocab_size=len(tokenizer), num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, **sizes)
    Olmo2ForCausalLM(config).save_pretrained(tmp_path / "model")
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    rows = []
    for number in range(50):
        asked, found = "ab"[number % 2], "cd"[number % 2]
        call = {"name": "search", "arguments": json.dumps({"q": asked})}
        messages = [
            {"role": "user", "content": f"river {asked}"},
            {"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "call_0", "content": found},
            {"role": "assistant", "content": f"the {found}"},
        ]
        rows.append(json.dumps({"messages": messages, "tools": [tool]}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = [
        *(f"data.train_files={tmp_path / 'rows.jsonl'}", f"model.path={tmp_path / 'model'}", "optim.lr=1e-2"),
        *(f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.total_training_steps=60", "trainer.device=cpu"),
        *("data.train_batch_size=10", "trainer.num_threads=1"),
    ]
    run_forked(command, (tmp_path, words), 1)
    assert (tmp_path / "status").read_text() == "0", (tmp_path / "stderr").read_text()
    losses = [json.loads(line)["sft/loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(math.log(len(tokenizer)), abs=0.3)
    assert losses[-1] < 0.1


def test_two_workers_learn_what_one_does(word_model: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.parquet")
    losses = {}
    for workers in (1, 2):
        words = [
            *(f"data.train_files={file}", f"model.path={word_model}", f"trainer.default_local_dir={tmp_path / 'run'}"),
            *("trainer.total_training_steps=3", "data.train_batch_size=8", "trainer.device=cpu"),
            *("trainer.overwrite=archive", f"trainer.n_gpus_per_node={workers}"),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "verl.trainer.sft", *words], capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [f"model: {tmp_path / 'run' / 'global_step_3'}"]
        records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        losses[workers] = [record["sft/loss"] for record in records]
    assert losses[2] == pytest.approx(losses[1], rel=1e-4) and len(losses[2]) == 3


def test_without_a_phase_column_all_rows_serve_both(word_model: str, tmp_path: Path) -> None:
    rows = read_rows([str(write_rows(tmp_path / "rows.parquet", phases=False))])
    settings = ["data.lm_fraction=0.5", "trainer.total_training_steps=2", "data.train_batch_size=16"]
    batches = Batches(sft_config(word_model, tmp_path, *settings), load_tokenizer(word_model, False, "path"), rows)
    (_, lm), (_, policy) = batches.next(0), batches.next(1)
    assert len(lm) == len(policy) == 16
    assert int(lm.tokens["loss_mask"].sum()) > int(policy.tokens["loss_mask"].sum())


def bad_file(path: Path, name: str) -> str:
    file = path / f"{name}.parquet"
    good = [{"source": "policy", "text": "a"}]
    with_ids = {"source": "policy", "text": "a", "ids": [3]}
    columns = {
        "empty": {"segments": pa.array([], SEGMENTS)},
        "other_column": {"text": ["a"]},
        "no_segments": {"segments": pa.array([good, []], SEGMENTS)},
        "bad_source": {"segments": pa.array([good, [{"source": "user", "text": "a"}]], SEGMENTS)},
        "no_text": {"segments": pa.array([[{"source": "policy", "text": None}]], SEGMENTS)},
        "some_ids": {"segments": pa.array([[with_ids, {"source": "policy", "text": "a", "ids": None}]], WITH_IDS)},
        "negative_id": {"segments": pa.array([[with_ids], [with_ids | {"ids": [-1]}]], WITH_IDS)},
        "bad_phase": {"segments": pa.array([good], SEGMENTS), "phase": ["sft"]},
    }
    if name == "not_parquet":
        file.write_text("a,b")
    elif name in columns:
        pq.write_table(pa.table(columns[name]), file)
    return str(file)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "no such file"),
        ("not_parquet", "cannot be read as parquet"),
        ("empty", "no rows in"),
        ("other_column", "column 'segments' is missing; its columns are text"),
        ("no_segments", "row 1, column 'segments' is empty"),
        ("bad_source", "row 1, column 'segments': source 'user' is not prompt, policy, environment"),
        ("no_text", "is not a struct of the strings"),
        ("some_ids", "row 0, column 'segments': ids must be integers from 0, in all segments or in none"),
        ("negative_id", "row 1, column 'segments': ids must be integers from 0"),
        ("bad_phase", "row 0, column 'phase': 'sft'"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, message: str) -> None:
    file = bad_file(tmp_path, name)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(file)
    assert file in str(caught.value)


def test_other_bad_input(word_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"data.train_files={tmp_path / 'absent.parquet'}"]) == 2
    assert "absent.parquet: no such file" in capsys.readouterr().err
    assert main(["data.train_batchsize=3"]) == 2
    assert "data.train_batch_size" in capsys.readouterr().err
    file = write_rows(tmp_path / "rows.parquet")
    assert (
        main([f"data.train_files={file}", f"model.path={word_model}", "trainer.default_local_dir=/dev/null/run"]) == 2
    )
    assert "run folder: /dev/null/run: /dev/null is a file" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="path=.*: no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path), False, "path")
    rows = [Row(("policy",), ("a b",), "policy", "x")]
    with pytest.raises(DataError, match="no row has phase 'lm'"):
        Batches(
            sft_config(word_model, tmp_path, "data.lm_fraction=0.5"), load_tokenizer(word_model, False, "path"), rows
        )
    with pytest.raises(DataError, match="no rows in no file at all"):
        run(sft_config(word_model, tmp_path, "data.train_files=[]"))


def test_adapters_learn_beside_a_frozen_base(model_path: str, tmp_path: Path) -> None:
    engine = SftEngine(sft_config(model_path, tmp_path, "model.lora_rank=4", "optim.lr=2e-2"), CPU)
    losses = [engine.step(make_batch())["loss"] for _ in range(6)]
    assert losses[-1] < 0.8 * losses[0]
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    frozen = {name: p for name, p in engine.model.model.named_parameters() if not p.requires_grad}
    assert frozen and all(torch.equal(p.detach().to_local(), base[name]) for name, p in frozen.items())
    engine.save_pretrained(tmp_path / "saved", None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert len(changed) == 2 * 7 and (tmp_path / "saved" / "adapter" / "adapter_config.json").is_file()
    with pytest.raises(ConfigError, match="model.lora_alpha has no effect with lora_rank=0"):
        sft_config(model_path, tmp_path, "model.lora_alpha=3")


def test_a_sweep_over_seeds(word_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = f"-m model.path={word_model} data.train_files={write_rows(tmp_path / 'rows.parquet')} trainer.device=cpu"
    words += (
        f" hydra.sweep.dir={tmp_path / 'seeds'} trainer.seed=0,1 trainer.total_training_steps=2 trainer.num_threads=1"
        " data.train_batch_size=4"  # not all rows: the seed says which
    )
    assert main(words.split()) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capfd.readouterr().out.splitlines()]
    table = [line for line in lines if len(line) == 4]
    assert table[0] == ["run", "step", "warm start loss", "status"]
    assert [line[0] for line in table[2:]] == ["seed=0", "seed=1", "mean of 2 seeds"]
    losses = []
    for seed in (0, 1):
        folder = tmp_path / f"seeds/seed={seed}"
        losses.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["sft/loss"])
        assert (folder / "global_step_2/model.safetensors").is_file()
        assert float(table[2 + seed][2]) == pytest.approx(losses[-1], rel=1e-3)
    assert losses[0] != losses[1]
