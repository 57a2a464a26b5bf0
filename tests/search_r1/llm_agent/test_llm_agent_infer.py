"""infer.py: which settings it takes, what it refuses, what it prints; at a terminal; and with its engine (slow)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from chat_tokenizer import QWEN_TEMPLATE, chat_tokenizer
from e2e_world import free_port
from llm_agent_scripted import agent_of
from llm_agent_world import OBSERVATIONS, QUESTION, ROOT, TURNS
from rich.console import Console
from transformers import Gemma3Config, Qwen2Config

from search_r1.llm_agent.agent import limits_within, load_tokenizer
from search_r1.llm_agent.command_line import agent_config
from search_r1.llm_agent.grammar import SEARCH_R1
from verl.agent.environment import SUMMARY_REQUEST
from verl.agent.episode import Compaction
from verl.agent.text import encode_text
from verl.protocol import WAITING, Prompt, Segment, Source, Status, Trajectory

OWN_ENGINE = """
class Engine:
    def check(self):
        raise OSError("the index is not built")

    def search(self, query):
        return []
"""


@pytest.fixture(scope="module")
def infer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("infer_under_test", ROOT / "infer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model_folder(byte_tokenizer, tmp_path: Path) -> str:
    """What a model folder has besides its weights."""
    byte_tokenizer.save_pretrained(tmp_path)
    Qwen2Config(max_position_embeddings=256, vocab_size=300).save_pretrained(tmp_path)
    return str(tmp_path)


def config_of(infer: ModuleType, *arguments: str):
    return agent_config(infer.parse_arguments(list(arguments)))


def test_defaults_are_the_published_ones(infer):
    config = config_of(infer)
    assert config.retriever.url == "http://127.0.0.1:8000/retrieve" and config.retriever.topk == 3
    assert (config.data.max_prompt_length, config.data.max_response_length) == (4096, 500)
    assert (config.data.max_obs_length, config.max_turns, config.agent.template) == (500, 4, "search_r1")


def test_flags_and_texts_with_special_characters(infer):
    url = "http://host:1/a=b;c[d]{e}'$f\\g?h=i"
    config = config_of(infer, "--retriever_url", url, "--topk", "5", "--max_turns", "0", "--template", "a, b")
    assert (config.retriever.url, config.retriever.topk, config.max_turns) == (url, 5, 0)
    assert config.agent.template == "a, b"


def test_a_training_config_brings_its_settings(infer):
    config, flagged = (
        config_of(infer, "--config-name", "tinywiki"),
        config_of(infer, "--config-name", "tinywiki", "--max_turns", "1"),
    )
    assert config.agent.template == "tinywiki" and config.max_turns > 1
    assert flagged.max_turns == 1 and flagged.data == config.data


def test_question_from_the_command_line_is_asked_once(infer):
    assert list(infer.questions("Who?")) == ["Who?"]


def test_window_of_the_model_bounds_the_episode(infer, model_folder):
    _, window = load_tokenizer(config_of(infer, "--model", model_folder))
    assert window == 256
    assert limits_within(config_of(infer), window).window == 256
    assert limits_within(config_of(infer), None).window == 4596


def test_window_of_a_model_that_also_sees_is_that_of_its_text_part(infer, model_folder):
    Gemma3Config(text_config={"max_position_embeddings": 512}).save_pretrained(model_folder)
    assert load_tokenizer(config_of(infer, "--model", model_folder))[1] == 512


def test_unreachable_retriever_is_told_before_a_model_loads(infer, model_folder, capsys):
    url = f"http://127.0.0.1:{free_port()}/retrieve"
    at_once = ["retriever.timeout_s=0.3", "retriever.deadline_s=0.3"]
    assert infer.main([*at_once, "--model", model_folder, "--question", "who", "--retriever_url", url]) == 1
    said = capsys.readouterr().err
    assert url in said and "retrieval_launch.sh" in said


def test_own_engine_is_found_where_the_command_is_given(model_folder, tmp_path):
    """Started by its path from another folder; the engine's complaint comes before a model loads."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_search.py").write_text(OWN_ENGINE)
    program = [sys.executable, str(ROOT / "infer.py"), "--model", model_folder, "--question", "who"]
    command = [*program, "retriever.engine=my_search.Engine"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "the index is not built" in done.stderr and "Traceback" not in done.stderr


def episode(tokenizer) -> Trajectory:
    turns = [
        (Source.PROMPT, "the prompt"),
        (Source.POLICY, "<think>hm</think> so <search> a river </search>"),
        (Source.ENVIRONMENT, "\n\n<information>Doc 1(Title: [bold]x) " + "w " * 100 + "</information>\n\n"),
        (Source.POLICY, "<answer> Sael </answer><|endoftext|>"),
    ]
    trajectory = Trajectory("g", Prompt((), "infer", {}), status=Status.ANSWERED, num_turns=2, num_searches=1)
    for source, text in turns:
        ids = encode_text(tokenizer, text)
        log_probs = (0.0,) * len(ids) if source is Source.POLICY else None
        trajectory.segments.append(Segment(source, ids, log_probs))
    trajectory.events = [{"executed": True, "query": "a river"}, {}]
    return trajectory


def printed(infer: ModuleType, tokenizer, trajectory: Trajectory, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=60, color_system="standard" if terminal else None)
    infer.show(console, "Where?", trajectory, tokenizer, SEARCH_R1, 1.5)
    return output.getvalue()


def test_plain_text_when_piped(infer, byte_tokenizer):
    text = printed(infer, byte_tokenizer, episode(byte_tokenizer), terminal=False)
    assert "\x1b" not in text and "the prompt" not in text and "endoftext" not in text
    assert "<search> a river </search>\n\n<information>Doc 1(Title: [bold]x) w w" in text
    assert "w " * 100 in text  # not wrapped
    assert text.endswith("Answer: Sael\n(answered, 1 search, 2 turns, 1.5 s)\n")


def test_what_was_found_does_not_speak_to_the_terminal(infer, byte_tokenizer):
    """Such as by sequences that write its clipboard (OSC 52), clear it, or hide text; the C1 form has one character."""
    evil = "\x1b]52;c;cm0gLXJm\x07 \x1b[2J \x9b8m \x7f"
    trajectory = episode(byte_tokenizer)
    trajectory.segments[2] = Segment(Source.ENVIRONMENT, encode_text(byte_tokenizer, f"\n\n{evil}\n\n"))
    ids = encode_text(byte_tokenizer, f"<answer> {evil} </answer>")
    trajectory.segments[3] = Segment(Source.POLICY, ids, (0.0,) * len(ids))
    trajectory.failure = evil
    for terminal in (False, True):
        text = printed(infer, byte_tokenizer, trajectory, terminal)
        assert text.count(r"\x1b]52;c;cm0gLXJm \x1b[2J \x9b8m \x7f") == 4
        own = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the colours
        assert not set(map(chr, (*range(9), *range(11, 32), *range(127, 160)))) & set(own)


def test_colours_on_a_terminal(infer, byte_tokenizer):
    text = printed(infer, byte_tokenizer, episode(byte_tokenizer), terminal=True)
    assert "\x1b[2m<think>hm</think>" in text
    assert "\x1b[32m<information>Doc 1" in text
    assert "\x1b[1;36m<search> a river </search>" in text
    assert "\x1b[1;33m<answer> Sael </answer>" in text


def test_each_speaker_begins_on_a_line_of_its_own(infer, byte_tokenizer):
    trajectory = Trajectory("g", Prompt((), "infer", {}), status=Status.TURN_LIMIT, num_turns=2)
    told = [(Source.POLICY, "I think."), (Source.ENVIRONMENT, "The turn was not valid."), (Source.POLICY, "Oh")]
    for source, text in told:
        ids = encode_text(byte_tokenizer, text)
        log_probs = (0.0,) * len(ids) if source is Source.POLICY else None
        trajectory.segments.append(Segment(source, ids, log_probs))
        trajectory.events.append({})
    assert "\nI think.\nThe turn was not valid.\nOh\n" in printed(infer, byte_tokenizer, trajectory, terminal=False)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ([Status.ANSWERED], 0),
        ([Status.TURN_LIMIT], 3),
        ([Status.ANSWERED, Status.LENGTH_LIMIT], 3),
        ([Status.TURN_LIMIT, Status.FAILED], 1),
    ],
)
def test_the_exit_status_says_whether_there_was_an_answer(
    infer, byte_tokenizer, monkeypatch: pytest.MonkeyPatch, statuses: list[Status], status: int
):
    from search_r1.llm_agent import agent as agent_module

    ended = iter(statuses)

    class Agent:
        tokenizer, template = byte_tokenizer, type("Template", (), {"grammar": SEARCH_R1})

        def prompt(self, question: str) -> Prompt:
            return Prompt((), "infer", {})

        async def play(self, prompt: Prompt, seed: int | None) -> Trajectory:
            return Trajectory("g", prompt, status=next(ended))

    @contextlib.asynccontextmanager
    async def open_agent(config, sampling):
        yield Agent()

    monkeypatch.setattr(agent_module, "open_agent", open_agent)
    monkeypatch.setattr(infer, "questions", lambda question: ["who?"] * len(statuses))
    assert infer.main(["--question", "who?"]) == status


def test_text_that_no_encoding_has_ends_no_session(infer, byte_tokenizer, monkeypatch: pytest.MonkeyPatch):
    """A question in another encoding than the terminal's, by flag and by pipe; and a passage in Chinese for a terminal
    that has no such characters."""
    from search_r1.llm_agent import agent as agent_module

    asked = []

    class Agent:
        tokenizer, template = byte_tokenizer, type("Template", (), {"grammar": SEARCH_R1})

        def prompt(self, question: str) -> Prompt:
            asked.append(question)
            return Prompt((), "infer", {})

        async def play(self, prompt: Prompt, seed: int | None) -> Trajectory:
            return Trajectory("g", prompt, status=Status.FAILED, failure="\u4e2d")

    @contextlib.asynccontextmanager
    async def open_agent(config, sampling):
        yield Agent()

    monkeypatch.setattr(agent_module, "open_agent", open_agent)
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="latin-1"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9?\n"), encoding="utf-8"))
    assert infer.main([]) == infer.main(["--question", "caf\udce9?"]) == 1
    sys.stdout.flush()
    assert asked == ["caf\ufffd?"] * 2
    assert output.getvalue().decode("latin-1").count("Question: caf\\ufffd?\n\nThe retriever failed: \\u4e2d\n") == 2


@pytest.mark.parametrize("program", ["infer", "serve", "evaluation"])
def test_a_chat_template_without_a_system_role_is_refused_before_the_model_is_loaded(
    infer, tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str
):
    # A model without weights, whose template takes user messages only.
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    chat_tokenizer(template=no_system + QWEN_TEMPLATE).save_pretrained(tmp_path / "model")
    Qwen2Config(max_position_embeddings=600).save_pretrained(tmp_path / "model")
    (tmp_path / "mine.txt").write_text("---\nsystem: Be brief.\n---\n{question}")
    (tmp_path / "asked.jsonl").write_text('{"id": "0", "question": "who?", "golden_answers": ["Osk"]}\n')
    flags = ["--model", str(tmp_path / "model"), "--template", str(tmp_path / "mine.txt")]
    if program == "infer":
        status = infer.main([*flags, "--question", "who?"])
    elif program == "serve":
        status = importlib.import_module("search_r1.serve.__main__").main([*flags, "--port", str(free_port())])
    else:
        flags += [
            "--method",
            "direct",
            "--output_dir",
            str(tmp_path / "out"),
            "--data",
            f"nq={tmp_path / 'asked.jsonl'}",
        ]
        status = importlib.import_module("search_r1.evaluation.__main__").main(flags)
    assert status == 2
    said = capsys.readouterr().err
    assert "System role not supported. It takes no system message: leave `system` out of the header" in said
    assert "Traceback" not in said and "loading the model" not in said


def test_failure_and_no_answer_are_said(infer, byte_tokenizer):
    trajectory = episode(byte_tokenizer)
    trajectory.segments.pop()
    trajectory.status, trajectory.failure = Status.FAILED, "no answer from http://x"
    text = printed(infer, byte_tokenizer, trajectory, terminal=False)
    assert "The retriever failed: no answer from http://x" in text and "Answer: (none)" in text


def test_passages_that_are_held_back_for_a_summary_are_shown_after_it(infer, byte_tokenizer):
    agent = agent_of(
        byte_tokenizer, ["<search> river </search>", "<summary> a river </summary>", "<answer> Vonmark </answer>"], 1500
    )
    compaction = Compaction(at=len(agent.prompt("Where?").ids) + 60, max_times=1, max_length=60)
    agent = replace(agent, limits=replace(agent.limits, compaction=compaction))
    trajectory = asyncio.run(agent.play(agent.prompt("Where?")))
    text = printed(infer, byte_tokenizer, trajectory, terminal=False)
    shown = [SUMMARY_REQUEST, "<summary> a river </summary>", trajectory.events[0][WAITING], "<answer> Vonmark"]
    assert [text.count(one) for one in shown] == [1] * 4
    assert sorted(shown, key=text.index) == shown


@pytest.mark.slow  # the rehearsal of the quickstart asks by infer.py, and the server gives the same transcript
@pytest.mark.timeout(900)
def test_infer_searches_and_answers(policy_folder: Path, search_url: str) -> None:
    """Two questions from the terminal, the second one without its question mark."""
    command = [sys.executable, "infer.py", "--model", str(policy_folder), "--template", "tinywiki", "--topk", "1"]
    done = subprocess.run(
        [*command, "--retriever_url", search_url, "--dtype", "float32"],
        input=f"{QUESTION}\n{QUESTION.rstrip('?')}\n\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = (
        f"{TURNS[0]}{OBSERVATIONS[0]}{TURNS[1]}{OBSERVATIONS[1]}{TURNS[2]}"
        "\nAnswer: Sael\n(answered, 2 searches, 3 turns, "
    )
    assert done.stdout.count(expected) == 2
    assert done.stdout.startswith("Question: ") and "empty to leave" not in done.stdout + done.stderr
    told = re.findall(r"^\[ *\d+ s\] (.*)$", done.stderr, re.MULTILINE)
    assert f"loading the model {policy_folder}" in told and told[-1].startswith("the engine is ready, after ")


PROGRAM = """
import os
import sys
from contextlib import asynccontextmanager

sys.path[:0] = sys.argv[2:]
import infer
import search_r1.llm_agent.agent as agent_module
from llm_agent_scripted import agent_of
from transformers import AutoTokenizer


@asynccontextmanager
async def open_agent(config, sampling):
    try:
        yield agent_of(AutoTokenizer.from_pretrained(sys.argv[1]), ["<think> hm </think><answer> Sael </answer>"])
    finally:
        print("closed", file=sys.stderr)


agent_module.open_agent = open_agent
assert infer.main([]) == 0
print("once more", file=sys.stderr)
sys.stdout.flush()
os.dup2(2, 1)  # from now on everything goes to the terminal
sys.stdout.reconfigure(line_buffering=True)
sys.exit(infer.main([]))
"""


class Terminal:
    """The program with a terminal of its own, and a pipe for what it prints."""

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the controlling terminal
            env=os.environ | {"TERM": "xterm", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        end = time.monotonic() + 300
        while self.shown.count(text) < times:
            assert time.monotonic() < end and self.process.poll() is None, f"no {text!r} in {self.shown!r}"
            if select.select([self._ours], [], [], 1.0)[0]:
                self.shown += os.read(self._ours, 4096).decode()

    def interrupt(self, answer: str) -> None:
        """Ctrl-C, until the answer is there: readline does not notice a signal that comes just before it waits."""
        for _ in range(30):
            self.type("\x03")
            again = time.monotonic() + 10
            while time.monotonic() < again:
                if select.select([self._ours], [], [], 1.0)[0]:
                    self.shown += os.read(self._ours, 4096).decode()
                if answer in self.shown:
                    return
        raise AssertionError(f"no {answer!r} in {self.shown!r}")

    def end(self) -> int:
        """Its exit status; the rest is in `shown`."""
        try:
            while chunk := os.read(self._ours, 4096):
                self.shown += chunk.decode()
        except OSError:  # the other side is closed
            pass
        return self.process.wait(timeout=300)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(byte_tokenizer, tmp_path: Path) -> Iterator[Terminal]:
    byte_tokenizer.save_pretrained(tmp_path)
    terminal = Terminal([sys.executable, "-c", PROGRAM, str(tmp_path), str(Path(__file__).parent)])
    yield terminal
    terminal.close()


@pytest.mark.timeout(900)
def test_answers_alone_go_to_a_pipe_and_lines_are_edited_until_the_first_ctrl_c(terminal: Terminal) -> None:
    """Twice in one process, which takes seconds to start: with a pipe behind it, and with the terminal alone."""
    terminal.wait_for("Question (empty to leave): ")
    terminal.type("Where?\n\n")
    terminal.wait_for("once more")
    assert terminal.process.stdout is not None
    output = terminal.process.stdout.read().decode()
    assert output.startswith("Question: Where?\n<think> hm </think><answer> Sael </answer>\nAnswer: Sael\n")
    terminal.shown = terminal.shown.partition("once more")[2]
    terminal.wait_for("Question (empty to leave): ")
    terminal.type("here?\x01W\n")  # Ctrl-A goes to the start of the line
    terminal.wait_for("Answer: Sael")
    terminal.wait_for("Question (empty to leave): ", times=2)
    assert "Question: Where?" in terminal.shown
    terminal.interrupt("closed")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown
