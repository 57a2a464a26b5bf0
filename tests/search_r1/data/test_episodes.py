"""`search-r1 data episodes`: rows of a warm start, which the run's own environment plays again token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_models import DATE, tokenizer_of
from scripted_policy import Script
from served_app import served_app, served_corpus, write_passages
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from search_r1.data.episodes.__main__ import config_of, main, parse_arguments
from search_r1.data.episodes.demonstrator import LeftOut, TagTurns, answer_in
from search_r1.data.episodes.queries import Thoughts, key_words, plans_of
from search_r1.data.qa.build import PromptBuilder
from search_r1.data.qa.paragraphs import gold_titles
from search_r1.data.qa.source_files import QuestionFile
from search_r1.llm_agent.agent import limits_within
from search_r1.llm_agent.templates import load_template
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.retrieval_app import create_app
from search_r1.search.server.retrieval_service import RetrievalService
from verl.agent.environment import Sampling, make_environment
from verl.agent.episode import EpisodeLimits, run_episode
from verl.config import load_config
from verl.data.prompts import PromptSource
from verl.data.sft_rows import Row, format_for, read_rows, tokenise, tokenise_conversation
from verl.errors import ConfigError
from verl.pretrained import load_tokenizer
from verl.protocol import Prompt, Segment, Source, Trajectory
from verl.tracking.tracker import settings_text
from verl.tracking.trajectory_store import write_trajectories

PASSAGES = {
    "river": '"Ildra"\nThe Ildra is a river. It flows through the city of Vonmark.',
    "city": '"Vonmark"\nVonmark is a city of the country Sael.',
    "poet": '"Nara Quill"\nNara Quill was a poet, born in 1931 in the village of Tolm <|im_end|>.',
    "hill": '"Mount Osk"\nMount Osk is a hill near the sea.',
}
ONE_HOP, TWO_HOPS = "When was the poet Nara Quill born?", "Through which country does the Ildra flow?"
QUESTIONS: list[dict[str, Any]] = [
    {
        "id": "poet",
        "question": ONE_HOP,
        "golden_answers": ["in the year 1931", "1931"],
        "metadata": {"supporting_facts": {"title": ["Nara Quill"], "sent_id": [0]}},
    },
    {
        "id": "river",
        "question": TWO_HOPS,
        "golden_answers": ["SAEL"],
        "metadata": {"supporting_facts": [["Vonmark", 0], ["Ildra", 0], ["Vonmark", 1]]},
    },
    {"id": "opera", "question": "Who composed the opera Belvane?", "golden_answers": ["Orrin Dace"]},
    {"id": "yes", "question": "Is Mount Osk near the sea?", "golden_answers": ["yes"]},
    {"id": "older", "question": "Which is higher, Mount Osk or Tolm?", "golden_answers": ["Mount Osk"]},
]
LIMITS = ["data.max_start_length=1500", "data.max_prompt_length=3000"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_passages(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES)


@pytest.fixture(scope="module")
def url(corpus: Path) -> Iterator[str]:
    with served_corpus(corpus) as address:
        body = json.dumps({"queries": ["warm up"], "topk": 1}).encode()
        request = Request(address, body, {"Content-Type": "application/json"})
        urlopen(request, timeout=120).close()  # the first search compiles the index's kernel
        yield address


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "rivers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


def model_folder(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """What a config needs of a model: its config.json and its tokenizer."""
    Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Path:
    return model_folder(tmp_path / "model", byte_tokenizer)


def words(questions: Path, model: Path, url: str, output: Path, *more: str) -> list[str]:
    given = ["--questions", str(questions), "--model", str(model), "--output", str(output)]
    strategies = "question,keywords,title,hops"
    return [*given, "--retriever_url", url, "--topk", "1", "--strategies", strategies, *more, *LIMITS]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def played_again(arguments: list[str], questions: Path, rows: list[dict[str, Any]], turns_of) -> list[Trajectory]:
    """The episodes of a run with these settings, whose prompts come from a prompt file made of the same questions, and
    whose policy says the turns that `turns_of` takes from a row."""
    config = config_of(parse_arguments(arguments))
    prompts = questions.with_name("prompts.parquet")
    builder = PromptBuilder(load_template(config.agent.template))
    builder.write(prompts, [QuestionFile("rivers", "train", questions)], "train")
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path, False, "model")

    async def play() -> list[Trajectory]:
        environment = make_environment(config, tokenizer)
        source = PromptSource(
            str(prompts),
            tokenizer,
            max_start_length=config.data.max_start_length,
            tags=environment.tags,
            prompt_ids=environment.prompt_ids,
        )
        by_question = {prompt.row["question"]: prompt for prompt in source.all()}
        limits = limits_within(config, 4096)
        try:
            return [
                await run_episode(
                    by_question[row["question"]],
                    "g",
                    Script(turns_of(row)),
                    environment,
                    tokenizer,
                    Sampling(),
                    limits,
                    None,
                )
                for row in rows
            ]
        finally:
            await environment.close()

    return asyncio.run(play())


def said_in(row: dict[str, Any]) -> list[list[int]]:
    return [segment["ids"] for segment in row["segments"] if segment["source"] == "policy"]


def test_rows_with_tags_are_the_rollouts_of_a_run(
    tmp_path: Path, questions: Path, model: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.parquet"
    arguments = words(questions, model, url, output)
    assert main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    rows = rows_of(output)
    assert [(row["question"], row["data_source"]) for row in rows] == [(ONE_HOP, "rivers"), (TWO_HOPS, "rivers")]
    assert rows[1]["strategy"] == "hops", "no other query finds the country"
    assert said[0] == f"{output}: 2 rows from 5 questions"
    assert sorted(line for line in said if "left out" in line) == [
        "  left out: 1 the answer is in the question",
        "  left out: 1 the answer is not in what was found",
        "  left out: 1 the answer is yes or no, which no passage says",
    ]
    assert sum("by strategy: 1 " in line for line in said) == 2
    # The same ids, segment by segment, as a policy with these turns has in a run.
    trajectories = played_again(arguments, questions, rows, said_in)
    for row, played in zip(rows, trajectories, strict=True):
        assert [(one.source, list(one.ids)) for one in played.segments] == [
            (Source(segment["source"]), segment["ids"]) for segment in row["segments"]
        ]
        assert str(played.status) == "answered"
    assert trajectories[0].events[-1]["answer"] == "1931", "as the passage writes the gold answer that it has"
    assert [event.get("query") for event in trajectories[1].events] == ["Ildra", "Vonmark", None]
    assert trajectories[1].events[-1]["answer"] == "Sael"
    # And training has them with the mask of the rollout.
    tokenizer = load_tokenizer(str(model), False, "model")
    for row, played in zip(read_rows(str(output)), trajectories, strict=True):
        trained = tokenise(tokenizer, row, "policy", 4096)
        assert trained.ids_L.tolist() == played.ids and trained.loss_mask_L.tolist() == played.loss_mask


@pytest.mark.parametrize("name", ["default-system", "xml", "headers", "qwen3"])
def test_rows_of_a_chat_model_are_the_rollouts_of_a_run(name: str, tmp_path: Path, questions: Path, url: str) -> None:
    output, model = tmp_path / "rows.parquet", model_folder(tmp_path / "model", tokenizer_of(name))
    tokenizer = load_tokenizer(str(model), False, "model")  # of another class, by the config's model type
    arguments = words(questions, model, url, output, "--format", "chat")
    assert main(arguments) == 0
    rows, stored = rows_of(output), read_rows(str(output))
    assert [row["strategy"] for row in rows][1] == "hops"
    form = format_for(tokenizer, stored, options=DATE)
    assert form is not None
    trained = [tokenise_conversation(form, row, "policy", 4096) for row in stored]

    def turns_of(row: dict[str, Any]) -> list[tuple[int, ...]]:
        [conversation] = [one for one, other in zip(stored, rows, strict=True) if other is row]
        return [form.turn(message) for message in conversation.messages if message["role"] == "assistant"]

    for [sequence], played in zip(trained, played_again(arguments, questions, rows, turns_of), strict=True):
        assert sequence.ids_L.tolist() == played.ids and sequence.loss_mask_L.tolist() == played.loss_mask
        assert played.events[-1]["answer"].endswith("</answer>")
    found = [message["content"] for message in rows[1]["messages"] if message["role"] == "tool"]
    assert "Vonmark" in found[0] and "Sael" in found[1]


def test_a_seed_decides_and_the_file_is_the_same_again(tmp_path: Path, questions: Path, model: Path, url: str) -> None:
    def strategies(*more: str) -> pa.Table:
        output = tmp_path / "rows.parquet"
        assert main(words(questions, model, url, output, *more)) == 0
        return pq.read_table(output)

    first = strategies("--seed", "1")
    assert strategies("--seed", "1").equals(first)
    assert any(not strategies("--seed", str(seed)).equals(first) for seed in (2, 3))
    assert strategies("--seed", "1", "--num_rows", "1").equals(first.slice(0, 1)), "rows do not depend on later ones"


def test_a_prompt_file_is_asked_with_its_own_prompts(
    tmp_path: Path, questions: Path, model: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "short.txt"
    template.write_text("Use <search> and <information>, then <answer>. Question: {question}")
    prompts = tmp_path / "own.parquet"
    builder = PromptBuilder(load_template(str(template)))
    builder.write(prompts, [QuestionFile("rivers", "train", questions)], "train")
    output = tmp_path / "rows.parquet"
    assert main(words(prompts, model, url, output, "--template", str(template))) == 0
    rows = rows_of(output)
    assert [row["segments"][0]["text"] for row in rows] == [
        f"Use <search> and <information>, then <answer>. Question: {question}" for question in (ONE_HOP, TWO_HOPS)
    ]
    # the template asks for no thought
    assert rows[1]["segments"][1]["text"] == "<search> Ildra </search>"
    assert rows[1]["segments"][-1]["text"] == "<answer> Sael </answer>"
    # those of two sets with the same ids
    sets = [QuestionFile(name, "train", questions) for name in ("rivers", "lakes")]
    builder.write(tmp_path / "merged.parquet", sets, "train")
    assert main(words(tmp_path / "merged.parquet", model, url, output, "--template", str(template))) == 0
    assert len(rows_of(output)) == 2 * len(rows)
    # prompts that ask for other tags than the run reads
    other = tmp_path / "research.parquet"
    PromptBuilder(load_template("research")).write(other, [QuestionFile("rivers", "train", questions)], "train")
    capsys.readouterr()
    assert main(words(other, model, url, tmp_path / "none.parquet")) == 2
    assert "give the template that the file was made with: --template" in capsys.readouterr().err
    assert not (tmp_path / "none.parquet").exists()


def breaking_after(corpus: Path, num_answered: int) -> Callable[..., Awaitable[None]]:
    """A server that answers so many searches, and then that it is out of order."""
    rows = Corpus(corpus)
    app, left = create_app(RetrievalService(Bm25Retriever.build(rows), rows)), [num_answered]

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/retrieve":
            left[0] -= 1
            if left[0] < 0:
                await send({"type": "http.response.start", "status": 503, "headers": []})
                await send({"type": "http.response.body", "body": b"out of order"})
                return
        await app(scope, receive, send)

    return serve


@pytest.mark.parametrize("form", ["tags", "chat"])
def test_without_a_retriever_there_are_no_rows(
    form: str, tmp_path: Path, questions: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = model_folder(tmp_path / "model", tokenizer_of("default-system")), tmp_path / "out" / "rows.parquet"
    soon = ("--format", form, "retriever.timeout_s=1", "retriever.deadline_s=2")
    assert main(words(questions, model, "http://127.0.0.1:9/retrieve", output, *soon)) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    # One that breaks later: after the check and a first search, whose row is not written either.
    with served_app(breaking_after(corpus, 2)) as address:
        assert main(words(questions, model, f"{address}/retrieve", output, *soon)) == 1
    assert "error: " in capsys.readouterr().err
    assert not output.parent.exists() or not list(output.parent.iterdir())


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        (['{"question": "Why?"}'], [], "known formats"),
        (['{"question": "Why?", "golden_answers": []}'], [], "rivers.jsonl:1: "),
        (
            ['{"question": "Why?", "golden_answers": ["x"], "metadata": {"supporting_facts": [1]}}'],
            [],
            "the gold titles in its metadata cannot be read",
        ),
        (['{"question": "Why?", "golden_answers": ["x"]}'], [], "no row could be made, and "),
        (None, ["do_search=false"], "do_search is false"),
        (None, ["--template", "direct"], "has no search that a written policy knows"),
        (None, ["--format", "chat", "agent.tools=[calculator]"], "agent.tools has no search"),
        (None, ["--format", "chat", "--template", "search_r1"], "set agent.template=chat"),
        (None, ["data.max_response_length=8"], "a turn is longer than data.max_response_length"),
        (None, ["data.max_start_length=8"], "the prompt is longer than data.max_start_length"),
    ],
)
def test_bad_input_is_told(
    lines: Sequence[str] | None,
    more: list[str],
    said: str,
    tmp_path: Path,
    questions: Path,
    url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if lines is not None:
        questions.write_text("\n".join(lines))
    model, output = model_folder(tmp_path / "model", tokenizer_of("default-system")), tmp_path / "rows.parquet"
    given = ["--questions", str(questions), "--model", str(model), "--output", str(output), "--retriever_url", url]
    assert main([*given, *LIMITS, *more]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def test_a_question_with_broken_gold_titles_can_be_left_out(
    tmp_path: Path, questions: Path, model: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = QUESTIONS[0] | {"id": "broken", "metadata": {"supporting_facts": [1]}}
    questions.write_text("".join(json.dumps(row) + "\n" for row in (broken, QUESTIONS[1])))
    output = tmp_path / "rows.parquet"
    assert main(words(questions, model, url, output, "--skip_bad_rows")) == 0
    assert f"skipped: {questions}: question broken: the gold titles" in capsys.readouterr().err
    assert [row["question"] for row in rows_of(output)] == [TWO_HOPS]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output", "x.parquet"], "give either --questions or --from_trajectories"),
        (["--output", "x.jsonl", "--questions", "q"], "has to be named .parquet"),
        (
            ["--output", "x.parquet", "--questions", "q", "--strategies", "guess"],
            "'guess' has to name some of question",
        ),
        (
            ["--output", "x.parquet", "--questions", "nq=x.parquet"],
            "--output x.parquet is also read; name another file",
        ),
        (["--output", "x.parquet", "--questions", "q", "--num_rows", "0"], "0 is not a whole number above 0"),
        (
            ["--output", "x.parquet", "--questions", "q", "--by", "em", "--per_prompt", "2"],
            "without effect with --questions: --by, --per_prompt; leave it out",
        ),
        (
            ["--output", "x.parquet", "--from_trajectories", "t.parquet", "--format", "chat", "--seed", "1"],
            "without effect with --from_trajectories: --format, --seed; leave it out",
        ),
        (
            ["max_turns=2", "--output", "x.parquet", "--from_trajectories", "t.parquet", "--topk", "5"],
            "without effect with --from_trajectories: --topk, max_turns=2; leave it out",
        ),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert said in capsys.readouterr().err


def test_good_trajectories_of_a_run_become_rows(
    tmp_path: Path,
    questions: Path,
    model: Path,
    url: str,
    byte_tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "rows.parquet"
    arguments = words(questions, model, url, output)
    asked = [{"question": ONE_HOP, "answer": "1931"}, {"question": ONE_HOP, "answer": "1932"}]
    trajectories = played_again(
        arguments, questions, asked, lambda row: [byte_tokenizer(f"<answer> {row['answer']} </answer>")["input_ids"]]
    )
    for trajectory, reward in zip(trajectories, (0.2, 0.9), strict=True):
        trajectory.reward = reward
    file = str(write_trajectories(tmp_path, "train", 1, trajectories, byte_tokenizer.decode))

    def answers(*more: str) -> list[str]:
        assert main(["--from_trajectories", file, "--output", str(output), *more]) == 0
        rows = read_rows(str(output))
        trained = [tokenise(byte_tokenizer, row, "policy", 4096) for row in rows]
        return [byte_tokenizer.decode(row.ids_L[row.loss_mask_L]) for row in trained]

    right, wrong = "<answer> 1931 </answer>", "<answer> 1932 </answer>"
    assert answers("--by", "em") == [right]
    for trajectory in trajectories:  # a chat model's answer is a whole turn
        trajectory.events[-1]["answer"] = f"I know it. <answer> {trajectory.events[-1]['answer']} </answer>"
    file = str(write_trajectories(tmp_path, "train", 2, trajectories, byte_tokenizer.decode))
    assert answers("--by", "em") == [right]
    assert "left out: 1 reward below 1" in capsys.readouterr().out
    # In the tags of the run's own template, which is in its folder, or of the folder that --run names.
    for trajectory in trajectories:
        trajectory.events[-1]["answer"] = trajectory.events[-1]["answer"].replace("answer>", "reply>")
    file = str(write_trajectories(tmp_path / "run", "train", 3, trajectories, byte_tokenizer.decode))
    assert main(["--from_trajectories", file, "--output", str(output), "--by", "em"]) == 2
    (tmp_path / "run" / "template.txt").write_text("---\ntags: {answer: reply}\n---\n{question}")
    settings = asdict(load_config("ppo_trainer", ["actor_rollout_ref.model.path=m", "data.train_files=t"]))
    (tmp_path / "run" / "config.yaml").write_text(settings_text(settings))
    assert answers("--by", "em") == [right]
    file = str(write_trajectories(tmp_path / "moved", "train", 3, trajectories, byte_tokenizer.decode))
    assert answers("--by", "em", "--run", str(tmp_path / "run")) == [right]
    assert answers("--at_least", "0.5") == [wrong]
    assert answers("--at_least", "0.1", "--per_prompt", "1") == [wrong]
    assert answers("--at_least", "0.1", "--num_rows", "1") == [wrong]
    output.unlink()
    assert main(["--from_trajectories", file, "--output", str(output), "--at_least", "2"]) == 2
    assert "no trajectory is good enough" in capsys.readouterr().err and not output.exists()


def test_rows_have_the_text_that_their_ids_are_checked_against() -> None:
    """A tokenizer that removes spaces where it decodes, as some without byte-level BPE do."""
    pieces = [("<unk>", 0.0), *((character, -1.0) for character in "\u2581abcdefghijklmnopqrstuvwxyz.?</>")]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", clean_up_tokenization_spaces=True)
    turns = TagTurns(tokenizer, load_template("search_r1").grammar)
    ids = turns.answer("i know .", "sael")
    trajectory = Trajectory("g", Prompt((3, 4), "t", {}), [Segment(Source.PROMPT, (3, 4))])
    trajectory.segments.append(Segment(Source.POLICY, ids, (0.0,) * len(ids)))
    segments = turns.row(trajectory)["segments"]
    row = Row(*(tuple(one[name] for one in segments) for name in ("source", "text")), None, "row 0", ((3, 4), ids))
    assert tokenise(tokenizer, row, "policy", 4096).loss_mask_L.sum() == len(ids)


def test_plans_of_a_question() -> None:
    def plans(question: str, *titles: str) -> dict[str, tuple[str, ...]]:
        return {plan.strategy: plan.queries for plan in plans_of(question, titles)}

    assert plans("Who wrote the novel Emma?") == {
        "question": ("Who wrote the novel Emma?",),
        "keywords": ("wrote novel Emma",),
    }
    assert plans("Who wrote the novel Emma?", "Emma (novel)")["title"] == ("Emma (novel)",)
    two = plans("Who is the mother of the author of Emma?", "Jane Austen", "Emma (novel)")
    assert two["hops"] == ("Emma (novel)", "Jane Austen") and two["title"] == ("Emma (novel)",)
    assert two["bridge"] == ("Who is the mother of the author of Emma?", "Jane Austen")
    unnamed = plans("Who is she?", "Jane Austen", "Emma")
    assert not {"title", "hops"} & set(unnamed), "nobody could know where to begin"
    assert unnamed["bridge"] == ("Who is she?", "Emma"), "which the first passage has to name"
    assert "bridge" not in plans("Who is Emma?", "Emma")
    assert key_words("What is the name of the?") == ""
    assert "keywords" not in plans("Who is it?")


def test_titles_of_gold_passages() -> None:
    assert gold_titles({"titles": ["A", "B"]}) == ["A", "B"]
    with pytest.raises(ValueError, match="titles: 'A' is no list of texts"):
        gold_titles({"titles": "A"})
    steps = [{"support_paragraph": {"title": "B", "paragraph_text": ""}}]
    assert gold_titles({"supporting_facts": {"title": ["B", "A", "B"], "sent_id": [0, 1, 2]}}) == ["B", "A"]
    assert gold_titles({"supporting_facts": [["B", 0], ["A", 3]]}) == ["B", "A"]
    assert gold_titles({"question_decomposition": steps}) == ["B"]
    assert gold_titles({"type": "bridge"}) == []


def test_an_answer_is_written_as_it_was_read() -> None:
    assert answer_in("Born in New  York City.", ["new york city"]) == "New  York City"
    assert answer_in("the U.S.A. won", ["usa"]) == "usa", "the text has it, but not word by word"
    assert answer_in("Lune and Osk", ["Osk", "Lune"]) == "Osk", "the first gold answer that is there"
    with pytest.raises(LeftOut, match="not in what was found"):
        answer_in("a party", ["art"])


def test_own_thoughts(tmp_path: Path, questions: Path, model: Path, url: str) -> None:
    path, output = tmp_path / "thoughts.txt", tmp_path / "rows.parquet"
    path.write_text("search: Look for {query}!\n\nnext: And {query}.\nanswer: So it is {answer}.\n")
    assert main(words(questions, model, url, output, "--thoughts", str(path))) == 0
    said = [segment["text"] for segment in rows_of(output)[1]["segments"] if segment["source"] == "policy"]
    assert said == [
        "<think> Look for Ildra! </think><search> Ildra </search>",
        "<think> And Vonmark. </think><search> Vonmark </search>",
        "<think> So it is Sael. </think><answer> Sael </answer>",
    ]
    for text, error in (("search: <b>", ":1: a line is search, next, answer"), ("search: a", "no sentence for next")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=error):
            Thoughts.read(path)


def test_a_bridge_is_looked_up_after_the_question(tmp_path: Path, questions: Path, model: Path, url: str) -> None:
    output = tmp_path / "rows.parquet"
    assert main(words(questions, model, url, output, "--strategies", "question,bridge")) == 0
    said = [segment["text"] for segment in rows_of(output)[1]["segments"] if segment["source"] == "policy"]
    assert [text.rpartition("<search>")[2] for text in said[:2]] == [f" {TWO_HOPS} </search>", " Vonmark </search>"]
    assert "<answer> Sael </answer>" in said[2]


def test_limits_of_an_episode_hold(tmp_path: Path, questions: Path, model: Path, url: str) -> None:
    """With one search allowed, there is no plan of two."""
    output = tmp_path / "rows.parquet"
    assert main(words(questions, model, url, output, "--max_turns", "1")) == 0
    assert [row["question"] for row in rows_of(output)] == [ONE_HOP]
    assert EpisodeLimits.from_config(config_of(parse_arguments(words(questions, model, url, output)))).max_turns == 4
