"""Whole episodes drawn at random, against the chat template itself and against what is known of their turns."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
from drawn_turns import KnownTurn, Model, answer_turn, drawn_turns, hostile_texts
from format_models import DATE, Style, many, model_format, styles, tokenizer_of
from hypothesis import given
from hypothesis import strategies as st

from verl.agent.chat import CUT_OFF, SAID_NOTHING, ChatEnvironment
from verl.agent.environment import Generation, Sampling
from verl.agent.episode import Compaction, EpisodeLimits, run_episode
from verl.agent.formats import format_of
from verl.agent.text import encode_outside
from verl.agent.tools import CallLimits, StatefulTools, ToolError, load_tools, tool
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import IS_SUMMARY, WAITING, Prompt, Status, Trajectory, flat_tokens

NAMES = ("qwen2.5", "qwen3", "llama3.2", "drawn, tags are tokens", "drawn, tags are text")
MODES = ("template", "tool_cycle", "all")  # of thinking
SHORT = 100  # tokens of a result
LONG = "word after word " * 60


# The tools: the answers of an episode are drawn, and so are the kinds of its failures.

_answers: list[tuple[str, str]] = []


def _answer(number: int) -> str:
    kind, text = _answers[number % len(_answers)]
    if kind == "wrong":
        raise ToolError(text)
    if kind == "away":
        raise EnvironmentUnavailable(text)
    if kind == "bug":
        raise ValueError(text)
    return text


async def fetch(number: int, note: str = "") -> str:
    """Gives the text of a number; the lower the number, the later."""
    for _ in range(10 - number % 10):
        await asyncio.sleep(0)
    return _answer(number)


def look(number: int, note: str = "") -> str:
    """Gives the text of a number, in a thread."""
    return _answer(number)


class Counter(StatefulTools):
    """Counts within an episode."""

    def __init__(self, prompt: Prompt) -> None:
        self.number = 0

    @tool
    def count(self) -> str:
        """Counts."""
        self.number += 1
        return f"number {self.number}"


@lru_cache(maxsize=1)
def tool_set() -> Any:
    return load_tools([f"{__name__}.fetch", f"{__name__}.look", f"{__name__}.Counter"])


# The models.


@lru_cache
def real_model(name: str) -> Model:
    tokenizer, thinks = tokenizer_of(name), name == "qwen3"
    forms = {mode: model_format(name, mode) for mode in (MODES if thinks else MODES[:1])}
    if name == "llama3.2":
        return Model(name, tokenizer, forms, "<|eot_id|>", one_call=True, result="json", options=DATE)
    return Model(name, tokenizer, forms, "<|im_end|>", thinks=thinks, options=DATE)


@lru_cache(maxsize=64)
def drawn_model(style: Style) -> Model:
    tokenizer, thinks = style.tokenizer(), style.thinking != "none"
    forms = {mode: format_of(tokenizer, thinking=mode) for mode in (MODES if thinks else MODES[:1])}  # type: ignore[arg-type]
    result = "stripped" if style.strips else "as it is"
    return Model(repr(style), tokenizer, forms, style.end, thinks=thinks, result=result)


def models(name: str) -> st.SearchStrategy[Model]:
    if name.startswith("drawn"):
        return styles(tag_tokens=name == NAMES[3]).map(drawn_model)
    return st.just(real_model(name))


@dataclass(frozen=True)
class Plan:
    """An episode as it was drawn."""

    model: Model
    mode: str
    asked: list[dict[str, str]]
    turns: list[KnownTurn]
    answers: list[tuple[str, str]]
    limits: CallLimits
    max_invalid_turns: int | None
    max_turns: int
    max_context: int


@st.composite
def plans(draw: Any, name: str) -> Plan:
    model = draw(models(name))
    texts = hostile_texts(model)
    kinds = st.sampled_from(["text"] * 16 + ["wrong"] * 3 + ["away", "bug"])
    answers = draw(st.lists(st.tuples(kinds, texts | st.sampled_from(["", LONG])), min_size=1, max_size=5))
    asked = [{"role": "user", "content": draw(texts) + "?"}]
    if draw(st.booleans()):
        asked.insert(0, {"role": "system", "content": draw(texts) + "!"})
    a_turn = st.sampled_from([None] * 5 + [2, 1, 0])
    in_all = st.sampled_from([None, None, None, 3, 2, 2, 1, 0])
    turns = draw(st.lists(drawn_turns(model, st.integers(0, 9)), min_size=1, max_size=6))
    return Plan(
        model,
        draw(st.sampled_from(sorted(model.forms))),
        asked,
        [*turns, answer_turn(model)],
        answers,
        CallLimits(draw(a_turn), draw(in_all), draw(st.none() | st.just(SHORT))),
        draw(st.sampled_from([None, None, None, 1, 2, 3])),
        draw(st.sampled_from([6, 6, 6, 5, 4, 3, 2, 1, 0])),
        draw(st.sampled_from([100_000] * 4 + [1000])),
    )


class Policy:
    """Says the turns of a plan and then the last one again, with another log-prob for each token, and remembers what it
    was shown and said."""

    def __init__(self, turns: Sequence[KnownTurn]) -> None:
        self.turns, self.said = turns, list[KnownTurn]()
        self.contexts: list[tuple[int, ...]] = []
        self.log_probs: list[tuple[float, ...]] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        turn = self.turns[min(len(self.said), len(self.turns) - 1)]
        self.said.append(turn)
        self.contexts.append(tuple(ids))
        self.log_probs.append(tuple(-1.0 - place - 1000 * len(self.contexts) for place in range(len(turn.ids))))
        return Generation(turn.ids, self.log_probs[-1], "stop" if turn.finished else "length")


def play(plan: Plan, compaction: Compaction | None = None) -> tuple[Trajectory | None, Policy, ChatEnvironment]:
    """The episode; None if the code of a tool was wrong, which ends a run."""
    model = plan.model
    _answers[:] = plan.answers
    environment = ChatEnvironment(
        model.forms[plan.mode], tool_set(), model.tokenizer, plan.limits, plan.max_invalid_turns
    )
    prompt = Prompt(environment.prompt_ids(plan.asked), "asked", {}, messages=plan.asked)
    policy, limits = Policy(plan.turns), EpisodeLimits(plan.max_turns, 100_000, plan.max_context, compaction=compaction)
    played = run_episode(prompt, "g", policy, environment, model.tokenizer, Sampling(), limits, None)
    try:
        return asyncio.run(played), policy, environment
    except ConfigError as error:
        assert "raised ValueError" in str(error) and any(kind == "bug" for kind, _ in plan.answers)
        return None, policy, environment


@pytest.mark.timeout(900)  # 2,000 examples on a busy machine
@pytest.mark.parametrize("name", NAMES)
def test_an_episode_is_what_its_template_writes_and_what_was_drawn(name: str) -> None:
    if not name.startswith("drawn"):
        tokenizer_of(name)  # or skip

    @many
    @given(plans(name))
    def check(plan: Plan) -> None:
        trajectory, policy, environment = play(plan)
        if trajectory is None:
            return
        check_training(trajectory, policy)
        told = check_events(plan, trajectory)
        check_contexts(plan, policy, environment, told)

    check()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_policy_says_its_context_can_be_summed_up(name: str) -> None:
    """Also as a summary, and before one: no turn ends the run, and what is trained is what was sampled."""
    if not name.startswith("drawn"):
        tokenizer_of(name)  # or skip

    @many
    @given(plans(name), st.integers(1, 200), st.integers(1, 3))
    def check(plan: Plan, at: int, max_times: int) -> None:
        trajectory, policy, _ = play(plan, Compaction(at, max_times, 100_000))
        if trajectory is None:
            return
        check_training(trajectory, policy)
        asked = [WAITING in event for event in trajectory.events]
        assert sum(asked) <= max_times
        for turn, event in enumerate(trajectory.events):
            assert bool(event.get(IS_SUMMARY)) <= (turn > 0 and asked[turn - 1])
        assert trajectory.num_turns - sum(asked) <= plan.max_turns + 1

    check()


def check_training(trajectory: Trajectory, policy: Policy) -> None:
    """What a loss sees is what was sampled, each turn behind what it was sampled from, and nothing else is trained."""
    sequences: list[list[int]] = []
    trained: list[list[tuple[int, float]]] = []  # of each sequence: the places and their log-probs
    for context, turn, log_probs in zip(policy.contexts, policy.said, policy.log_probs, strict=True):
        if not sequences or list(context[: len(sequences[-1])]) != sequences[-1]:
            sequences.append([])
            trained.append([])
        sequences[-1] = [*context, *turn.ids]
        trained[-1] += [(len(context) + place, value) for place, value in enumerate(log_probs)]
    flat, start = flat_tokens([trajectory]), 0
    assert len(flat.lengths_B) == max(1, len(sequences))
    for ids, places, length in zip(sequences, trained, flat.lengths_B, strict=False):
        assert flat.ids_T[start : start + len(ids)].tolist() == ids
        found = [(place, flat.log_probs_T[start + place]) for place in range(length) if flat.loss_mask_T[start + place]]
        assert found == places
        start += length


Told = list[dict[str, str]]
"""The messages that follow a turn: their texts were drawn, or are in the turn's event."""


def check_events(plan: Plan, trajectory: Trajectory) -> list[Told]:
    """Each turn was read as it was drawn, calls were run within the limits, and the episode ended where it had to."""
    told: list[Told] = []
    num_run = num_counted = num_invalid = num_valid = 0
    ended: Status | None = None
    for number, (turn, event) in enumerate(zip(plan.turns, trajectory.events, strict=False)):
        assert ended is None
        last = number == plan.max_turns
        before = num_run
        if trajectory.status is Status.FAILED and number == len(trajectory.events) - 1:
            assert any(kind == "away" for kind, _ in plan.answers) and turn.calls and not last
            return told
        assert (event["reasoning"], event["content"]) == (turn.reasoning, turn.content)
        if not turn.calls and turn.content and turn.finished:
            assert (event["action"], event["answer"]) == ("answer", turn.content)
            num_valid, ended = num_valid + 1, Status.ANSWERED
            continue
        # Calls: as they were drawn, and those that can be run are run up to the limits.
        found = [(one["parsed"], tuple(one["span"]), one["name"], one["arguments"]) for one in event["calls"]]
        assert found == [(one.status, one.span, one.name, one.arguments) for one in turn.calls]
        place = 0  # among those of the turn that can be run
        messages: Told = []
        for call, one in zip(turn.calls, event["calls"], strict=True):
            if call.status != "ok" or last:
                assert "status" not in one and bool(one["detail"]) == (call.status != "ok")
                messages.append({"role": "tool", "name": call.name, "content": f"Error: {one['detail']}."})
                continue
            limits = plan.limits
            may_run = (limits.max_calls_per_turn is None or place < limits.max_calls_per_turn) and (
                limits.max_calls is None or before + place < limits.max_calls
            )
            place += 1
            if not may_run:
                assert one["status"] == "not_run" and one["result"].startswith("Error: this call was not run: ")
            elif call.name == "count":
                num_run, num_counted = num_run + 1, num_counted + 1
                assert (one["status"], one["result"]) == ("ok", f"number {num_counted}")
            else:
                num_run += 1
                check_result(plan, call.arguments["number"], one)
            messages.append({"role": "tool", "name": call.name, "content": one["result"]})
        if not turn.calls:
            assert event["feedback"] == (SAID_NOTHING if turn.finished else CUT_OFF)
            messages = [{"role": "user", "content": event["feedback"]}]
        # What the turn was.
        valid = any(call.status == "ok" for call in turn.calls)
        assert (event["action"], event["valid"]) == (("tool", True) if valid else ("invalid", False))
        num_valid, num_invalid = num_valid + valid, 0 if valid else num_invalid + 1
        if last or num_invalid == plan.max_invalid_turns:
            ended = Status.TURN_LIMIT
        told.append(messages)
    assert trajectory.num_valid_actions == num_valid
    if trajectory.status is Status.LENGTH_LIMIT:
        assert plan.max_context == 1000 and ended is None
    else:
        assert trajectory.status is ended
    return told


def check_result(plan: Plan, number: int, one: Mapping[str, Any]) -> None:
    """A result is the text that was drawn, cut if it is longer than the limit."""
    kind, text = plan.answers[number % len(plan.answers)]
    assert (kind, one["status"]) in (("text", "ok"), ("wrong", "error"))
    text = whole(text if kind == "text" else f"Error: {text}")
    most = plan.limits.max_result_tokens
    size = len(encode_outside(plan.model.tokenizer, text))
    if most is None or size <= most:
        assert one["result"] == text
        return
    start, _, note = one["result"].partition("\n[cut: ")
    assert one["cut"] and text.startswith(start) and note in ("", f"{len(text)} characters in all]")
    assert len(encode_outside(plan.model.tokenizer, one["result"])) <= most


def check_contexts(plan: Plan, policy: Policy, environment: ChatEnvironment, told: Sequence[Told]) -> None:
    """Each context is what the template writes for the whole conversation at once, in which a turn of this sequence is
    as it was sampled. It continues the one before unless thinking has to go."""
    model, first = plan.model, 0
    thinking = [model.token[tag] for tag in ("<think>", "</think>") if model.thinks]
    for number, context in enumerate(policy.contexts):
        assert len(context) <= plan.max_context
        if number:
            sampled = (*policy.contexts[number - 1], *plan.turns[number - 1].ids)
            goes = drops(model, plan.mode, told[number - 1][0]["role"])
            if goes and not set(thinking).isdisjoint(sampled):
                assert context[: len(sampled)] != sampled
                first = number
            else:
                assert context[: len(sampled)] == sampled
        assert items(model, context) == at_once(plan, environment, told, first, number)


def drops(model: Model, mode: str, role: str) -> bool:
    """Whether thinking has to leave the context when a message of this role comes, by the template's own doing."""
    if mode != "template":
        return mode == "tool_cycle" and role == "user"
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "said", "reasoning_content": "thought"},
        {"role": role, "content": "told"},
    ]
    return "thought" not in written(model, messages, [])


def written(model: Model, messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    return str(
        model.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=False,
            **model.options,
        )
    )


def items(model: Model, ids: Sequence[int]) -> list[int | str]:
    """Added tokens as their ids, and between them texts, in the normal form of the tokenizer."""
    found: list[int | str] = []
    run: list[int] = []
    for token in [*ids, None]:
        if token is not None and token not in model.added:
            run.append(token)
            continue
        found += [normal(model, model.read(run))] if run else []
        run = []
        found += [] if token is None else [token]
    return found


def at_once(plan: Plan, environment: ChatEnvironment, told: Sequence[Told], first: int, number: int) -> list[int | str]:
    """The context of turn `number` in a sequence that began with that of turn `first`, as `items`.

    The template is given words that nobody can take for anything else in place of all texts from outside, and in place
    of turns of this sequence. Then they are put in.
    """
    model = plan.model
    texts: dict[str, list[int | str]] = {}

    def stand_in(text: str, inside: str = "as it is") -> str:
        word = f"word{len(texts):04}word"
        text = whole(text)
        if inside == "json":
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        texts[word] = [text.strip() if inside == "stripped" else text]
        return word if text.strip() else text

    strips = "stripped" if model.result == "stripped" or model.one_call else "as it is"
    messages: list[dict[str, Any]] = [
        {"role": one["role"], "content": stand_in(one["content"], strips)} for one in plan.asked
    ]
    for place in range(number):
        turn = plan.turns[place]
        if place >= first:
            word = f"turn{place:04}turn"
            texts[word] = items(model, turn.ids)
            messages.append({"role": "assistant", "content": word})
        else:
            messages.append(structured(turn, stand_in, strips))
        for message in told[place]:
            how = model.result if message["role"] == "tool" else strips
            messages.append({"role": message["role"], "content": stand_in(message["content"], how)})
    # Its own parts, with the texts between them; the end of a turn may be the one that was sampled.
    found: list[int | str] = []
    skips = False
    text = written(model, messages, environment.schemas)
    for part in re.split(r"((?:word|turn)\d{4}(?:word|turn))", text):
        for piece in [part] if part in texts else model.own.split(part):
            if piece in texts:
                found += texts[piece]
                skips = piece.startswith("turn") and plan.turns[int(piece[4:8])].finished
            elif piece in model.token:
                found += [] if skips else [model.token[piece]]
                skips = False
            elif piece:
                assert not skips
                found.append(piece)
    return joined(model, found)


def structured(turn: KnownTurn, stand_in: Any, strips: str) -> dict[str, Any]:
    """The message of a turn in a conversation that is written anew."""
    message: dict[str, Any] = {"role": "assistant", "content": stand_in(turn.content, strips)}
    if turn.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": stand_in(call.name),
                    "arguments": {
                        key: stand_in(value, "json") if isinstance(value, str) else value
                        for key, value in call.arguments.items()
                    },
                },
            }
            for call in turn.calls
        ]
    return message


def joined(model: Model, found: Sequence[int | str]) -> list[int | str]:
    """Texts that stand beside each other as one."""
    result: list[int | str] = []
    for one in found:
        if isinstance(one, str) and result and isinstance(result[-1], str):
            result[-1] += one
        else:
            result.append(one)
    return [normal(model, one) if isinstance(one, str) else one for one in result if one != ""]


def normal(model: Model, text: str) -> str:
    normalizer = model.tokenizer.backend_tokenizer.normalizer
    return str(normalizer.normalize_str(text)) if normalizer else text


def whole(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
