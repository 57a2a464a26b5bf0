"""Which questions an evaluation asks: what files may hold, and the fixed part of a set."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from search_r1.data.qa.build import PromptBuilder
from search_r1.data.qa.source_files import QuestionFile
from search_r1.evaluation.questions import Question, load_questions, shares, stratified_subset
from search_r1.llm_agent.templates import load_template
from verl.errors import ConfigError, DataError

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "qa"


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def row(identifier: object = "a", **changed: object) -> dict[str, object]:
    return {"id": identifier, "question": "who", "golden_answers": ["x"]} | changed


def questions(kinds: str, set_name: str = "s") -> list[Question]:
    return [Question(set_name, str(number), ("x",), "who", kind) for number, kind in enumerate(kinds)]


def test_rows_of_flashrag(tmp_path: Path) -> None:
    metadata = {"type": "bridge", "level": "hard", "facts": [1]}
    path = write(tmp_path / "dev.jsonl.gz", row(3, metadata=metadata), row("b", golden_answers=["x", ""]))
    assert load_questions([f"hotpotqa={path}"], None) == [
        Question("hotpotqa", "3", ("x",), "who?", "bridge/hard"),
        Question("hotpotqa", "b", ("x", ""), "who?"),
    ]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [({"id": "b", "golden_answers": ["x"]}, "it has no question"), (row("a"), "the id 'a' stands already in line 1")],
)
def test_a_bad_row_is_an_error_that_names_its_line(bad: object, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", row(), bad)
    with pytest.raises(DataError, match=reason) as error:
        load_questions([f"s={path}"], None)
    assert f"{path}:2: " in str(error.value) and "--skip" not in str(error.value)


def test_the_same_id_in_two_sets_is_two_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", row())
    assert [question.key for question in load_questions([f"s={path}", f"t={path}"], None)] == ["s/a", "t/a"]
    with pytest.raises(DataError, match="is in"):
        load_questions([f"s={path}", f"s={path}"], None)


def test_a_folder_of_sets_takes_test_then_dev_then_train(tmp_path: Path) -> None:
    for name in ("zoo/train", "bamboogle/test", "nq/dev", "nq/test", "nq/train"):
        write(tmp_path / f"{name}.jsonl", row(name))
    (tmp_path / "empty").mkdir()
    assert [question.key for question in load_questions([], tmp_path)] == [
        "nq/nq/test",
        "bamboogle/bamboogle/test",
        "zoo/zoo/train",
    ]
    with pytest.raises(DataError, match="has no <set>"):
        load_questions([], tmp_path / "empty")


def test_nothing_to_ask_and_a_file_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data NAME=FILE"):
        load_questions([], None)
    with pytest.raises(ConfigError, match="say which set"):
        load_questions([str(write(tmp_path / "s.jsonl", row()))], None)


def test_rows_of_a_prompt_file_keep_their_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Who? Think."}]
    made = {
        "data_source": "nq",
        "prompt": messages,
        "reward_model": {"ground_truth": {"target": ["x", "y"]}},
        "extra_info": {"split": "test", "index": 7},
    }
    pq.write_table(pa.Table.from_pylist([made]), tmp_path / "p.parquet")
    expected = Question("nq", "test_7", ("x", "y"), None, "", messages)
    assert load_questions([str(tmp_path / "p.parquet")], None) == [expected]
    assert load_questions([f"mine={tmp_path / 'p.parquet'}"], None)[0].set_name == "mine"
    pq.write_table(pa.Table.from_pylist([made | {"id": "q1", "question": "Who?"}]), tmp_path / "p.parquet")
    [question] = load_questions([str(tmp_path / "p.parquet")], None)
    assert (question.id, question.text) == ("q1", "Who?")


@pytest.mark.parametrize("truth", ["72", ["72"], None, {"target": []}])
def test_a_prompt_file_without_gold_answers_to_compare_with(truth: object, tmp_path: Path) -> None:
    """As of other sets for veRL, whose reward function reads the text itself."""
    messages = [{"role": "user", "content": "Who?"}]
    made = {"data_source": "gsm8k", "prompt": messages, "reward_model": {"ground_truth": truth, "style": "rule"}}
    pq.write_table(pa.Table.from_pylist([made | {"extra_info": "none"}]), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet: row 0: 'reward_model.ground_truth.target' is"):
        load_questions([str(tmp_path / "p.parquet")], None)


@pytest.mark.parametrize(
    ("evidence", "found"),
    [
        (["101", "102", "101"], ("101", "102")),
        ([101, 102], ("101", "102")),
        ("A sentence.", ()),
        ([[[["Albany, Georgia-1"]], ["operation"]]], ()),  # of StrategyQA: paragraphs by step and annotator
        (None, ()),
    ],
)
def test_what_a_question_names_as_its_evidence(evidence: object, found: tuple[str, ...], tmp_path: Path) -> None:
    """Other sets call something else evidence, and are evaluated without its recall."""
    path = write(tmp_path / "mine/dev.jsonl", row("a", metadata={"evidence": evidence}))
    builder = PromptBuilder(load_template("search_r1"))
    builder.write(tmp_path / "p.parquet", [QuestionFile("mine", "dev", path)], "test")
    for source in (f"mine={path}", str(tmp_path / "p.parquet")):
        [question] = load_questions([source], None)
        assert question.evidence == found


def test_a_prompt_file_has_the_strata_of_the_file_it_was_made_of(tmp_path: Path) -> None:
    """The metadata of a prompt file is JSON text; its subset is that of the JSON lines, to the question."""
    kinds = [{"type": "bridge", "level": level} for level in ("easy", "hard")] + [{"type": "comparison"}, {"hops": 4}]
    rows = [row(f"q{i}", metadata=kinds[min(i % 7, 3)] if i % 5 else {}) for i in range(200)]
    path = write(tmp_path / "hotpotqa/dev.jsonl", *rows)
    builder = PromptBuilder(load_template("search_r1"))
    builder.write(tmp_path / "test.parquet", [QuestionFile("hotpotqa", "dev", path)], "test")
    lines, prompts = load_questions([f"hotpotqa={path}"], None), load_questions([str(tmp_path / "test.parquet")], None)
    assert [question.stratum for question in prompts] == [question.stratum for question in lines]
    assert {question.stratum for question in prompts} == {"bridge/easy", "bridge/hard", "comparison", "hops 4", ""}
    taken = stratified_subset(prompts, 40)
    assert [question.key for question in taken] == [question.key for question in stratified_subset(lines, 40)]
    whole, part = (Counter(question.stratum for question in some) for some in (prompts, taken))
    assert all(abs(part[kind] - whole[kind] / 5) < 1 for kind in whole)


def test_hops_in_extra_info_are_strata_and_other_metadata_says_nothing(tmp_path: Path) -> None:
    """TinyWiki says them in `extra_info`."""
    made = {
        "data_source": "tinywiki",
        "prompt": [{"role": "user", "content": "Who?"}],
        "reward_model": {"ground_truth": {"target": ["x"]}},
        "metadata": "from the archive",
    }
    infos = [{"split": "test", "index": i, "hops": 1 + i % 2} for i in range(4)]
    pq.write_table(pa.Table.from_pylist([made | {"extra_info": info} for info in infos]), tmp_path / "p.parquet")
    strata = [question.stratum for question in load_questions([str(tmp_path / "p.parquet")], None)]
    assert strata == ["hops 1", "hops 2"] * 2


def test_places_go_to_the_largest_remainders() -> None:
    # 10 places: 10 * 5 / 12 = 4.17, 10 * 4 / 12 = 3.33, 10 * 3 / 12 = 2.5: floors 4 + 3 + 2, the last to "c".
    assert shares({"a": 5, "b": 4, "c": 3}, 10) == {"a": 4, "b": 3, "c": 3}
    # Equal remainders: the first names.
    assert shares({"y": 1, "x": 1, "z": 1}, 2) == {"x": 1, "y": 1, "z": 0}


def test_a_subset_is_stratified_and_of_those_with_the_smallest_hashes() -> None:
    rows = questions("aaaaaaaabbbb")
    taken = stratified_subset(rows, 6, seed=3)
    assert Counter(question.stratum for question in taken) == {"a": 4, "b": 2}
    digests = {q.id: hashlib.sha256(f"3/s/{q.id}".encode()).hexdigest() for q in rows if q.stratum == "b"}
    assert {q.id for q in taken if q.stratum == "b"} == set(sorted(digests, key=digests.__getitem__)[:2])


def test_a_subset_does_not_depend_on_the_order_of_the_file_or_on_other_sets() -> None:
    rows = questions("aabbbbcccccc" * 20)
    taken = {question.id for question in stratified_subset(rows, 50)}
    shuffled = random.Random(1).sample(rows, len(rows))
    other = [Question("t", question.id, ("x",), "who", "b") for question in rows]
    both = stratified_subset([*other, *shuffled], 50)
    assert {question.id for question in both if question.set_name == "s"} == taken
    assert len(taken) == 50 and len(both) == 100
    assert {question.id for question in stratified_subset(rows, 50, seed=1)} != taken


def test_a_small_set_stays_whole_and_in_order() -> None:
    rows = questions("ab")
    assert stratified_subset(rows, 2) == rows and stratified_subset(rows, 500) == rows


@pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not there")
def test_real_files_lose_no_question_and_always_give_the_same_subset() -> None:
    rows = load_questions([], DATA)
    counts = Counter(question.set_name for question in rows)
    assert counts == {"nq": 2400, "hotpotqa": 5000, "2wikimultihopqa": 350, "bamboogle": 125}
    taken = stratified_subset(rows, 500)
    assert Counter(question.set_name for question in taken) == counts | {"nq": 500, "hotpotqa": 500}
    kinds = Counter(question.stratum for question in rows if question.set_name == "hotpotqa")
    found = Counter(question.stratum for question in taken if question.set_name == "hotpotqa")
    assert all(abs(found[kind] - kinds[kind] / 10) < 1 for kind in kinds) and len(kinds) == 2
