"""The folder a run starts from: every file there, readable, deterministic; the tokenizer takes any text."""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from search_r1.data.tinywiki import build
from search_r1.data.tinywiki.__main__ import main
from search_r1.data.tinywiki.build import TAGS, train_tokenizer
from search_r1.data.tinywiki.world import WORDS

SIZES = ["--num_passages", "600", "--num_test", "60", "--num_train", "60", "--num_sft_rows"]
OTHER = [*SIZES, "200", "--long", "--train_hops", "2", "--stop", "1", "--next_hop", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tinywiki"), *SIZES, "1000")


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With other options, and smaller."""
    return written(tmp_path_factory.mktemp("other"), *OTHER)


def written(path: Path, *options: str) -> Path:
    """The demonstrator's world is smaller than by default, for which there is no option."""
    smaller = partial(build.Recipe, num_sft_passages=3000)
    with mock.patch.multiple(build, Recipe=smaller, LONG=replace(build.LONG, num_sft_passages=3000)):
        assert main(["--output_dir", str(path), *options]) == 0
    return path


def test_whoever_may_read_the_folder_may_read_its_files(folder: Path) -> None:
    """safetensors' own writer leaves them to the owner alone."""
    (plain := folder.parent / "plain").touch()
    modes = {path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    assert modes == {plain.stat().st_mode}


def test_corpus(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == [str(number) for number in range(600)]
    assert len({row["contents"] for row in rows}) == 600


def test_prompts(folder: Path) -> None:
    titles = {json.loads(line)["contents"].split("\n")[0] for line in (folder / "corpus.jsonl").open(encoding="utf-8")}
    asked = {}
    for split, count in {"train": 60, "validation": 100, "test": 60}.items():
        rows = pq.read_table(folder / f"{split}.parquet").to_pylist()
        assert len(rows) == count
        assert [row["extra_info"]["index"] for row in rows] == list(range(count))
        assert all(f'"{title}"' in titles for row in rows for title in row["extra_info"]["chain"])
        asked[split] = {title for row in rows for title in row["extra_info"]["chain"]}
    sources = Counter(pq.read_table(folder / "test.parquet")["data_source"].to_pylist())
    assert sources == {"tinywiki_1hop": 30, "tinywiki_2hop": 30}
    assert asked["train"].isdisjoint(asked["test"]) and asked["validation"].isdisjoint(asked["test"])


def test_warm_start_rows(folder: Path) -> None:
    rows = pq.read_table(folder / "sft.parquet").to_pylist()
    phases = [row["phase"] for row in rows]
    assert phases == ["lm"] * 400 + ["policy"] * 600
    assert {segment["source"] for row in rows for segment in row["segments"]} == {"prompt", "policy", "environment"}
    assert all(row["segments"][-1]["source"] == "policy" for row in rows[400:])
    served = {json.loads(line)["contents"].split("\n")[0] for line in (folder / "corpus.jsonl").open(encoding="utf-8")}
    read = [segment["text"] for row in rows for segment in row["segments"] if segment["source"] == "environment"]
    assert not any(title in text for text in read[:200] for title in served)


def test_what_is_read_about_a_name_differs_from_row_to_row(folder: Path) -> None:
    """So it cannot be learned by heart."""
    rows = pq.read_table(folder / "sft.parquet").to_pylist()
    read = [segment["text"] for row in rows for segment in row["segments"] if segment["source"] == "environment"]
    about = [re.findall('"([^"]+)"', text)[0] for text in read]
    stated = {text.partition('"')[2].removesuffix("</information>\n\n") for text in read}
    assert len(set(about)) < len(read), "several rows read about the same name"
    assert len(stated) == len(read)


def test_policy_loads_and_each_word_and_tag_is_one_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy_init")
    model = AutoModelForCausalLM.from_pretrained(folder / "policy_init", dtype=torch.float32)
    assert 700_000 <= model.num_parameters() <= 4_000_000
    assert model.config.head_dim % 32 == 0 if hasattr(model.config, "head_dim") else True
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    for text in [*TAGS, *(f" {word}" for word in WORDS)]:
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1, text
    for tag in TAGS:
        assert tokenizer.decode(tokenizer(tag)["input_ids"], skip_special_tokens=True) == tag


def test_same_seed_same_folder(other_folder: Path, tmp_path: Path) -> None:
    written(tmp_path, *OTHER)
    for name in ("corpus.jsonl", "train.parquet", "test.parquet", "sft.parquet", "policy_init/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (other_folder / name).read_bytes(), name


def test_long_has_a_third_of_each(other_folder: Path) -> None:
    hops = Counter(row["extra_info"]["hops"] for row in pq.read_table(other_folder / "test.parquet").to_pylist())
    assert hops == {1: 20, 2: 20, 3: 20}


def test_options_change_what_is_trained_on_and_how_the_demonstrator_searches(other_folder: Path) -> None:
    train = pq.read_table(other_folder / "train.parquet").to_pylist()
    assert {row["extra_info"]["hops"] for row in train} == {2}
    rows = pq.read_table(other_folder / "sft.parquet").to_pylist()
    imitated = [row["segments"] for row in rows if row["phase"] == "policy"]
    assert {sum(segment["source"] == "environment" for segment in segments) for segments in imitated} == {1}


@pytest.mark.parametrize(
    ("option", "message"),
    [("--stop=1.5", "1.5 is not a probability in 0..1"), ("--train_hops=1,4", "1,4 is not a list of hop counts")],
)
def test_an_option_out_of_range_is_refused(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--output_dir", str(tmp_path), option])
    assert message in capsys.readouterr().err


def test_a_world_too_small_is_an_error_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output_dir", str(tmp_path), "--num_passages", "150", "--num_test", "500"]) == 2
    assert "raise its number of passages" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["Who is the mayor of Fenlum Galsto?"] * 3)


@settings(max_examples=2 * settings.default.max_examples)
@given(text=st.text())
def test_any_text_round_trips(small_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = small_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert small_tokenizer.decode(ids) == text
