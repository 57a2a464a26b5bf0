"""Prompts from parquet: what is refused and how it is said, the ids, the order, and going on where it stopped."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.agent.messages import encode_prompt
from verl.agent.text import encode_text
from verl.data.files import check_files
from verl.data.prompts import Curriculum, PromptSource
from verl.errors import DataError

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"


def rows_of(count: int, source="nq", text="question {i}?") -> list[dict]:
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": text.format(i=i)}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": [f"answer {i}"]}},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(count)
    ]


def write(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def ten(tmp_path: Path) -> str:
    return write(tmp_path / "ten.parquet", rows_of(10))


def source_of(files, tokenizer, **options) -> PromptSource:
    return PromptSource(files, tokenizer, **({"max_start_length": 100, "seed": 3} | options))


def indices(prompts) -> list[int]:
    return [prompt.row["extra_info"]["index"] for prompt in prompts]


def test_a_prompt_is_its_row_and_its_ids(ten, byte_tokenizer):
    prompt = source_of(ten, byte_tokenizer).all()[4]
    assert prompt.ids == encode_text(byte_tokenizer, "question 4?")
    assert prompt.data_source == "nq"
    assert prompt.row == rows_of(10)[4]
    assert all(type(token) is int for token in prompt.ids)


def test_chat_template_with_the_opening_of_the_answer(byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "who?"}]
    with pytest.raises(DataError, match="chat template"):
        encode_prompt(tokenizer, messages)
    tokenizer.chat_template = CHAT
    assert encode_prompt(tokenizer, messages) == list(encode_text(tokenizer, "[system]be\n[user]who?\n[me]"))


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT
TYPE_ERROR = "{% if messages[0].role == 'system' %}{{ 1 + 'a' }}{% endif %}" + CHAT
USER = {"role": "user", "content": "who?"}


@pytest.mark.parametrize("empty", ["", None])
@pytest.mark.parametrize("template", [None, CHAT, NO_SYSTEM])
def test_an_empty_system_message_is_left_out(tmp_path, byte_tokenizer, empty, template):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = template
    messages = [{"role": "system", "content": empty}, USER]
    expected = encode_text(tokenizer, "who?" if template is None else "[user]who?\n[me]")
    assert encode_prompt(tokenizer, messages) == list(expected)
    rows = [row | {"prompt": messages} for row in rows_of(1)]
    assert source_of(write(tmp_path / "empty.parquet", rows), tokenizer).all()[0].ids == expected
    with pytest.raises(DataError, match="empty, or has a message without content"):
        encode_prompt(tokenizer, messages[:1])
    with pytest.raises(DataError, match="empty, or has a message without content"):
        encode_prompt(tokenizer, [USER, {"role": "user", "content": empty}])


@pytest.mark.parametrize("role", ["human", "User", "", None])
@pytest.mark.parametrize(
    "template", [None, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}[me]"]
)
def test_a_role_that_templates_leave_out_is_an_error_that_names_the_row(tmp_path, byte_tokenizer, role, template):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = template
    rows = [row | {"prompt": [USER]} for row in rows_of(2)]
    rows[1]["prompt"] = [{"role": role, "content": "who?"}]
    path = write(tmp_path / "roles.parquet", rows)
    wanted = rf"{path}: row 1, .*messages\[0\] has the role {role!r}; use one of system, user, assistant, tool"
    with pytest.raises(DataError, match=wanted):
        source_of(path, tokenizer)


def test_a_chat_template_that_refuses_a_system_message_is_an_error_that_says_what_to_set(tmp_path, byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    rows = [row | {"prompt": [{"role": "system", "content": "be"}, USER]} for row in rows_of(1)]
    path = write(tmp_path / "system.parquet", rows)
    todo = "leave `system` out of the header of agent.template"
    for tokenizer.chat_template in (NO_SYSTEM, TYPE_ERROR):
        with pytest.raises(DataError, match=rf"{path}: row 0, .*(not supported|Error).*no system message: {todo}"):
            source_of(path, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=f"this one has none; {todo}"):
        source_of(path, tokenizer)
    tokenizer.chat_template = "{{ messages[0].content + 1 }}"  # whatever is asked
    with pytest.raises(DataError, match="cannot write this prompt: TypeError: [^.]*$"):
        encode_prompt(tokenizer, [USER])


def test_no_bos_is_added(byte_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(byte_tokenizer)
    start = ("<|pad|>", tokenizer.pad_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[start])
    assert tokenizer("a")["input_ids"][0] == tokenizer.pad_token_id
    assert encode_prompt(tokenizer, [{"role": "user", "content": "a"}]) == list(encode_text(tokenizer, "a"))
    assert len(encode_text(tokenizer, "a")) == 1


def test_each_epoch_has_every_row_once_in_its_own_order(ten, byte_tokenizer):
    source = source_of(ten, byte_tokenizer)
    epochs = [indices(source.next(10)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = source_of(ten, byte_tokenizer)
    assert [indices(again.next(10)) for _ in range(3)] == epochs
    other = source_of(ten, byte_tokenizer, seed=4)
    assert indices(other.next(10)) != epochs[0]


def test_batches_span_epochs(ten, byte_tokenizer):
    whole, parts = source_of(ten, byte_tokenizer), source_of(ten, byte_tokenizer)
    drawn = [index for _ in range(10) for index in indices(parts.next(7))]
    assert drawn == indices(whole.next(70))
    assert set(Counter(drawn).values()) == {7}


def test_without_shuffle_the_files_order_repeats(tmp_path, byte_tokenizer):
    files = [write(tmp_path / f"{name}.parquet", rows_of(2, name)) for name in ("b", "a")]
    source = source_of(files, byte_tokenizer, shuffle=False)
    assert [prompt.data_source for prompt in source.next(5)] == ["b", "b", "a", "a", "b"]


def test_all_is_in_file_order_and_moves_nothing(ten, byte_tokenizer):
    source, untouched = source_of(ten, byte_tokenizer), source_of(ten, byte_tokenizer)
    source.next(3), untouched.next(3)
    assert indices(source.all()) == list(range(10)) and len(source) == 10
    assert indices(source.next(4)) == indices(untouched.next(4))


def test_files_with_different_further_columns(tmp_path, byte_tokenizer):
    first = write(tmp_path / "a.parquet", [row | {"metadata": {"type": "bridge"}} for row in rows_of(2)])
    second = write(tmp_path / "b.parquet", rows_of(2, "hotpotqa"))
    prompts = source_of([first, second], byte_tokenizer).all()
    assert [prompt.row.get("metadata") for prompt in prompts] == [{"type": "bridge"}] * 2 + [None] * 2


@pytest.mark.parametrize("drawn", [23, 10])
def test_state_goes_on_where_it_stopped(ten, byte_tokenizer, drawn):
    """In the middle of an epoch, and at the end of one."""
    source, resumed = source_of(ten, byte_tokenizer), source_of(ten, byte_tokenizer)
    source.next(drawn)
    resumed.load_state_dict(source.state_dict())
    assert indices(resumed.next(40)) == indices(source.next(40))


HALVING = Curriculum(keep_probability=0.25, min_keep_probability=0.05, min_prompts=1)


def observe(source, outcomes: dict[int, str]) -> None:
    """For each prompt its groups in order: "=" for equal rewards, "x" for different ones."""
    prompts = source.all()
    for index, groups in outcomes.items():
        for group in groups:
            source.observe(prompts[index], group == "=")


def drawn_in(source, epochs: int) -> list[int]:
    """What is drawn until so many epochs are over."""
    drawn = []
    while True:
        [index] = indices(source.next(1))
        if source.state_dict()["epoch"] >= epochs:
            return drawn
        drawn.append(index)


def test_how_often_prompts_are_drawn_that_were_always_right_or_always_wrong(ten, byte_tokenizer):
    """In 2000 epochs, by hand: 1/4 after one group of equal rewards, then 1/8 and 1/16, and 1/20 at the least."""
    source = source_of(ten, byte_tokenizer, curriculum=HALVING)
    observe(source, {1: "=", 2: "==", 3: "===", 4: "====", 5: "=" * 300, 6: "=x", 7: "x=", 8: "===x="})
    drawn = Counter(drawn_in(source, 2000))
    always, expected = (0, 6, 9), {1: 500, 2: 250, 3: 125, 4: 100, 5: 100, 7: 500, 8: 500}
    assert {index: drawn[index] for index in always} == dict.fromkeys(always, 2000)
    for index, mean in expected.items():
        deviation = (mean * (1 - mean / 2000)) ** 0.5
        assert abs(drawn[index] - mean) < 4 * deviation, index
    assert source.curriculum_metrics()["curriculum/zero_variance_prompts"] == 0.7


def test_what_is_drawn_keeps_its_order_and_depends_on_the_seed(ten, byte_tokenizer):
    outcomes = {index: "=" for index in range(8)}
    sources = [source_of(ten, byte_tokenizer, curriculum=HALVING, seed=seed) for seed in (3, 3, 4)]
    for source in sources:
        observe(source, outcomes)
    first, again, other = (drawn_in(source, 30) for source in sources)
    assert first == again != other
    whole, left = source_of(ten, byte_tokenizer), iter(first)
    expected = next(left)
    for index in indices(whole.next(300)):
        if index == expected:
            expected = next(left, None)
    assert expected is None, "what is left of the order without a curriculum"


def test_an_epoch_in_which_all_would_be_skipped_has_its_last_prompts(ten, byte_tokenizer):
    """Of ten at least four are drawn: six are skipped, which are the first of the epoch's order."""
    never = Curriculum(keep_probability=1e-12, min_keep_probability=1e-12, min_prompts=4)
    source, whole = source_of(ten, byte_tokenizer, curriculum=never), source_of(ten, byte_tokenizer)
    observe(source, {index: "=" for index in range(10)})
    for _ in range(3):
        assert indices(source.next(4)) == indices(whole.next(10))[6:]
        assert source.curriculum_metrics() == {"curriculum/skipped": 0.6, "curriculum/zero_variance_prompts": 1.0}
    assert source.state_dict()["epoch"] == 2


def test_the_curriculum_counts_prompts_of_all_files(tmp_path, byte_tokenizer):
    """The second file's rows follow the first's."""
    files = [write(tmp_path / f"{name}.parquet", rows_of(2, name)) for name in ("a", "b")]
    never = Curriculum(keep_probability=1e-12, min_keep_probability=1e-12, min_prompts=1)
    source = source_of(files, byte_tokenizer, shuffle=False, curriculum=never)
    observe(source, {0: "=", 3: "="})
    assert [(one.data_source, *indices([one])) for one in source.next(4)] == [("a", 1), ("b", 0)] * 2


@pytest.mark.parametrize("drawn", [0, 7, 10, 23])
def test_the_state_has_what_the_curriculum_was_told(ten, byte_tokenizer, drawn):
    """What was drawn before counts, too: `min_prompts` is of the whole epoch."""
    halving = Curriculum(keep_probability=0.25, min_keep_probability=0.05, min_prompts=6)
    source = source_of(ten, byte_tokenizer, curriculum=halving)
    observe(source, {0: "x=", 1: "==", 2: "=====", 3: "=x", 4: "=" * 300, 5: "=", 6: "=", 7: "="})
    source.next(drawn)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = source_of(ten, byte_tokenizer, curriculum=halving)
    resumed.load_state_dict(state)
    for _ in range(5):
        assert indices(resumed.next(7)) == indices(source.next(7))
        for one in (source, resumed):
            observe(one, {3: "=", 4: "x"})
    assert resumed.state_dict() == source.state_dict()


def test_a_curriculum_may_be_switched_on_and_off_at_a_resume(ten, byte_tokenizer):
    """It then knows no group yet; without it every prompt is drawn."""
    plain, curriculum = source_of(ten, byte_tokenizer), source_of(ten, byte_tokenizer, curriculum=HALVING)
    plain.next(4)
    state = plain.state_dict()
    assert not {"num_equal", "num_skipped"} & state.keys(), "a run without it saves what it always has"
    observe(curriculum, {index: "=" for index in range(10)})
    curriculum.load_state_dict(state)
    assert indices(curriculum.next(26)) == indices(plain.next(26))
    observe(curriculum, {index: "=" for index in range(10)})
    off = source_of(ten, byte_tokenizer)
    off.load_state_dict(curriculum.state_dict())
    assert indices(off.next(30)) == indices(plain.next(30))


def test_state_of_other_prompts_is_refused(ten, byte_tokenizer):
    state = source_of(ten, byte_tokenizer).state_dict()
    with pytest.raises(DataError, match="seed"):
        source_of(ten, byte_tokenizer, seed=4).load_state_dict(state)
    with pytest.raises(DataError, match="the number of prompts was 10 and is 5"):
        source_of(ten, byte_tokenizer, num_rows=5).load_state_dict(state)
    other = write(Path(ten).with_name("other.parquet"), rows_of(10, text="question {i} and more?"))
    with pytest.raises(DataError, match=r"other.parquet: the digest of the prompts was .* trainer.resume_mode=disable"):
        source_of(other, byte_tokenizer).load_state_dict(state)
    moved = write(Path(ten).with_name("moved.parquet"), rows_of(10, "hotpotqa"))
    source_of(moved, byte_tokenizer).load_state_dict(state)


def test_a_chat_template_that_writes_the_date_does_not_change_the_digest(ten, byte_tokenizer):
    today, tomorrow = copy.deepcopy(byte_tokenizer), copy.deepcopy(byte_tokenizer)
    today.chat_template, tomorrow.chat_template = f"1 {CHAT}", f"2 {CHAT}"
    state = source_of(ten, today).state_dict()
    source_of(ten, tomorrow).load_state_dict(state)
    assert source_of(ten, today).ids_digest != source_of(ten, tomorrow).ids_digest


def test_a_state_from_before_there_were_digests(ten, byte_tokenizer):
    source = source_of(ten, byte_tokenizer)
    source.next(4)
    state = source.state_dict()
    del state["digest"]
    resumed = source_of(ten, byte_tokenizer)
    resumed.load_state_dict(state)
    assert indices(resumed.next(10)) == indices(source.next(10))


def test_a_prompt_with_a_token_that_the_model_lacks(ten, byte_tokenizer):
    larger = copy.deepcopy(byte_tokenizer)
    larger.add_tokens(["question 7"])
    source = source_of(ten, larger, tags=("question 7",))
    source.check_ids(len(larger))
    last = len(larger) - 1
    with pytest.raises(DataError, match=rf"ten.parquet: row 7, .* has token {last}, but .* 0 to {last - 1}"):
        source.check_ids(len(larger) - 1)


def test_one_prompt_of_each_kind(tmp_path, byte_tokenizer):
    rows = rows_of(12)
    rows[3]["reward_model"]["ground_truth"]["target"] = []
    rows[4]["reward_model"]["ground_truth"]["target"] = [None]
    rows[5]["reward_model"]["ground_truth"]["target"] = ["a", "b"]  # of the first row's kind
    rows[6]["reward_model"]["ground_truth"]["target"] = ["a", " "]
    rows[7]["reward_model"]["ground_truth"]["target"] = None
    rows[8]["reward_model"]["ground_truth"] = None
    rows[9]["data_source"] = "hotpotqa"
    rows[10]["extra_info"]["index"] = None
    file = write(tmp_path / "a.parquet", rows)
    places = [(place, prompt.row) for place, prompt in source_of(file, byte_tokenizer).kinds()]
    assert places == [(f"{file}: row {i}", rows[i]) for i in (0, 3, 4, 6, 7, 8, 9, 10)]
    few = source_of(file, byte_tokenizer, num_rows=3)
    drawn = [prompt.row for prompt in few.all()]
    assert drawn and all(prompt.row in drawn for _, prompt in few.kinds()), "of what the run reads"


def test_subsample_is_seeded_and_keeps_the_order(ten, byte_tokenizer):
    chosen = indices(source_of(ten, byte_tokenizer, num_rows=4).all())
    assert chosen == sorted(chosen) and len(set(chosen)) == 4
    assert chosen == indices(source_of(ten, byte_tokenizer, num_rows=4).all())
    samples = {tuple(indices(source_of(ten, byte_tokenizer, num_rows=4, seed=seed).all())) for seed in range(5)}
    assert len(samples) > 1
    with pytest.raises(DataError, match="11 rows"):
        source_of(ten, byte_tokenizer, num_rows=11)


def test_overlong_prompts_are_named_or_dropped_and_counted(tmp_path, byte_tokenizer, caplog):
    rows = rows_of(4)
    rows[2]["prompt"][0]["content"] = "long " * 50
    path = write(tmp_path / "long.parquet", rows)
    with pytest.raises(DataError, match=r"long\.parquet: row 2, column 'prompt': the prompt has \d+ tokens"):
        source_of(path, byte_tokenizer, max_start_length=30)
    source = source_of(path, byte_tokenizer, max_start_length=30, filter_overlong=True)
    assert indices(source.all()) == [0, 1, 3] and len(source) == 3
    assert "dropped 1 of 4" in caplog.text
    with pytest.raises(DataError, match="every prompt"):
        source_of(path, byte_tokenizer, max_start_length=1, filter_overlong=True)


def test_limit_is_inclusive(ten, byte_tokenizer):
    longest = max(len(prompt.ids) for prompt in source_of(ten, byte_tokenizer).all())
    source_of(ten, byte_tokenizer, max_start_length=longest)
    with pytest.raises(DataError):
        source_of(ten, byte_tokenizer, max_start_length=longest - 1)


def test_more_rows_than_one_tokeniser_call(tmp_path, byte_tokenizer):
    path = write(tmp_path / "many.parquet", rows_of(2500))
    prompts = source_of(path, byte_tokenizer).all()
    assert [prompt.ids for prompt in prompts[1020:1030]] == [
        encode_text(byte_tokenizer, f"question {i}?") for i in range(1020, 1030)
    ]


def test_files_that_cannot_be_read(tmp_path, ten, byte_tokenizer):
    table = pq.read_table(ten)
    (tmp_path / "text.parquet").write_text("{}")
    pq.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    messages = {"absent": "no such file", "text": "is not a parquet file", "empty": "has no rows"}
    for column in ("prompt", "data_source", "reward_model"):
        pq.write_table(table.drop_columns([column]), tmp_path / f"no_{column}.parquet")
        messages[f"no_{column}"] = f"column '{column}' is missing; its columns are"
    for name, message in messages.items():
        with pytest.raises(DataError, match=f"{name}.parquet: {message}"):
            check_files([ten, str(tmp_path / f"{name}.parquet")])
    with pytest.raises(DataError, match="absent.parquet: no such file"):
        source_of(str(tmp_path / "absent.parquet"), byte_tokenizer)
    with pytest.raises(DataError, match="no prompt file"):
        check_files([])


@pytest.mark.parametrize(
    ("column", "value", "hint"),
    [
        ("prompt", "text", "is string, but must be a list of"),
        ("prompt", [{"role": "user", "text": "x"}], "list of"),
        ("data_source", 3, "must be a string"),
        ("reward_model", {"style": "rule"}, "ground_truth"),
    ],
)
def test_wrong_type(tmp_path, column, value, hint):
    path = write(tmp_path / "typed.parquet", [row | {column: value} for row in rows_of(2)])
    with pytest.raises(DataError, match=f"typed.parquet: column '{column}' .*{hint}"):
        check_files(path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        *((column, None, "is null") for column in ("data_source", "reward_model")),
        *(("prompt", value, "the prompt is empty") for value in (None, [])),
        *(("prompt", [{"role": "user", "content": text}], "the prompt is empty") for text in ("", None)),
    ],
)
def test_a_value_that_is_missing_names_its_row(tmp_path, byte_tokenizer, column, value, message):
    rows = rows_of(3)
    rows[1][column] = value
    path = write(tmp_path / "null.parquet", rows)
    with pytest.raises(DataError, match=f"null.parquet: row 1, column '{column}': {message}"):
        source_of(path, byte_tokenizer)


def test_another_prompt_column(tmp_path, byte_tokenizer):
    rows = [{("chat" if key == "prompt" else key): value for key, value in row.items()} for row in rows_of(2)]
    path = write(tmp_path / "chat.parquet", rows)
    assert len(source_of(path, byte_tokenizer, prompt_key="chat")) == 2


def test_checking_files_needs_no_torch(ten):
    program = (
        "import sys; from verl.data.files import check_files; print(check_files(sys.argv[1]), 'torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program, ten], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10", "False"]
