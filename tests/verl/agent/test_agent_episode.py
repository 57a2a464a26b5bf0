"""Episodes of a scripted policy: how each one ends, what is in context when, and that budgets hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from verl.agent.environment import INTERRUPTED, Environment, Generation, Outcome, Sampling
from verl.agent.episode import EpisodeLimits, run_episode, turn_seed
from verl.agent.pause import Pause
from verl.agent.text import decode_turn, encode_text, policy_texts
from verl.errors import EnvironmentUnavailable, RolloutError
from verl.protocol import Prompt, Source, Status, Trajectory

LIMITS = EpisodeLimits(max_turns=2, max_response_length=64, max_context_length=512)


@dataclass
class ScriptedSampler:
    """A policy that says its lines in order, each cut at `max_tokens`; it keeps what it was asked."""

    tokenizer: object
    lines: list[str]
    contexts: list[list[int]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        line = encode_text(self.tokenizer, self.lines[len(self.contexts)])
        self.contexts.append(list(ids))
        self.samplings.append(sampling)
        cut = line[: sampling.max_tokens]
        return Generation(cut, tuple(-0.5 for _ in cut), "stop" if len(cut) == len(line) else "length")


@dataclass
class Library(Environment):
    """Looks up `ask <word>`, ends at `say <word>`, and is closed on request."""

    tokenizer: object
    reply: str = "\nbook\n"
    is_open: bool = True
    stop_strings: tuple[str, ...] = ("!",)
    calls: list[tuple[str, bool]] = field(default_factory=list)

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        self.calls.append((text, tools_allowed))
        if text.startswith("say"):
            return Outcome("answer", True, True, event={"answer": text[4:]})
        if not text.startswith("ask"):
            return Outcome("invalid", False, False, "\nwhat?\n" if tools_allowed else "")
        if not tools_allowed:
            return Outcome("search", True, False)
        if not self.is_open:
            raise EnvironmentUnavailable("the library is closed")
        return Outcome("search", True, False, self.reply, {"query": text[4:]})


def play(tokenizer, lines, limits=LIMITS, seed=7, prompt_text="question: ", **library):
    sampler = ScriptedSampler(tokenizer, lines)
    environment = Library(tokenizer, **library)
    prompt = Prompt(encode_text(tokenizer, prompt_text), "test", {})
    trajectory = asyncio.run(
        run_episode(prompt, "g0", sampler, environment, tokenizer, Sampling(temperature=0.7), limits, seed)
    )
    return trajectory, sampler, environment


def sources(trajectory: Trajectory) -> str:
    return "".join(segment.source.value[:2] + " " for segment in trajectory.segments).strip()


def test_answered_after_two_searches(byte_tokenizer):
    trajectory, sampler, _ = play(byte_tokenizer, ["ask river", "ask sea", "say blue<|endoftext|>"])
    assert trajectory.status is Status.ANSWERED
    assert sources(trajectory) == "pr po en po en po"
    assert (trajectory.num_turns, trajectory.num_valid_actions, trajectory.num_searches) == (3, 3, 2)
    assert [event["action"] for event in trajectory.events] == ["search", "search", "answer"]
    assert [event.get("query") for event in trajectory.events] == ["river", "sea", None]
    assert trajectory.events[2]["text"] == "say blue" and trajectory.events[2]["turn"] == 2
    assert trajectory.ids[-1] == byte_tokenizer.eos_token_id  # as sampled: the EOS is trained
    assert decode_turn(byte_tokenizer, trajectory.ids) == "question: ask river\nbook\nask sea\nbook\nsay blue"
    assert policy_texts(trajectory, byte_tokenizer) == ["ask river", "ask sea", "say blue"]
    assert [context == trajectory.ids[: len(context)] for context in sampler.contexts] == [True] * 3


def test_segments_carry_the_samplers_log_probs(byte_tokenizer):
    trajectory, _, _ = play(byte_tokenizer, ["ask river", "say it"])
    assert {lp for lp, mask in zip(trajectory.log_probs, trajectory.loss_mask, strict=True) if mask} == {-0.5}
    assert {lp for lp, mask in zip(trajectory.log_probs, trajectory.loss_mask, strict=True) if not mask} == {0.0}


def test_turn_limit_ends_with_a_turn_without_tools(byte_tokenizer):
    trajectory, sampler, library = play(byte_tokenizer, ["ask a", "ask b", "ask c", "say never"])
    assert trajectory.status is Status.TURN_LIMIT
    assert len(sampler.contexts) == 3
    assert [allowed for _, allowed in library.calls] == [True, True, False]
    assert trajectory.num_searches == 2  # the third was not executed
    assert sources(trajectory) == "pr po en po en po"


def test_no_tool_turns_is_one_generation(byte_tokenizer):
    limits = EpisodeLimits(max_turns=0, max_response_length=64, max_context_length=512)
    trajectory, sampler, library = play(byte_tokenizer, ["ask a", "say b"], limits)
    assert trajectory.status is Status.TURN_LIMIT
    assert len(sampler.contexts) == 1 and library.calls == [("ask a", False)]


def test_invalid_turn_gets_feedback_and_uses_up_a_turn(byte_tokenizer):
    trajectory, _, _ = play(byte_tokenizer, ["hm", "hm", "say x"])
    assert trajectory.status is Status.ANSWERED
    assert (trajectory.num_turns, trajectory.num_valid_actions, trajectory.num_searches) == (3, 1, 0)
    assert decode_turn(byte_tokenizer, trajectory.ids) == "question: hm\nwhat?\nhm\nwhat?\nsay x"


def test_failed_infrastructure_keeps_the_policy_ignorant(byte_tokenizer):
    trajectory, _, _ = play(byte_tokenizer, ["ask a", "say b"], is_open=False)
    assert trajectory.status is Status.FAILED
    assert trajectory.failure == "the library is closed"
    assert sources(trajectory) == "pr po"
    assert trajectory.reward is None and trajectory.num_searches == 0
    assert trajectory.events[-1]["text"] == "ask a"


def test_observation_that_does_not_fit_ends_the_episode(byte_tokenizer):
    trajectory, sampler, _ = play(byte_tokenizer, ["ask a", "say b"], reply="long " * 200)
    assert trajectory.status is Status.LENGTH_LIMIT
    assert sources(trajectory) == "pr po"
    assert trajectory.events[-1]["observation_dropped"] is True
    assert len(sampler.contexts) == 1


@pytest.mark.parametrize(("spare", "status"), [(0, Status.ANSWERED), (-1, Status.LENGTH_LIMIT)])
def test_context_limit_is_inclusive(byte_tokenizer, spare, status):
    texts = ["question: ", "ask a", "\nbook\n"]
    exact = sum(len(encode_text(byte_tokenizer, text)) for text in texts)
    limits = EpisodeLimits(max_turns=2, max_response_length=64, max_context_length=exact + spare)
    trajectory, _, _ = play(byte_tokenizer, ["ask a", "say b"], limits)
    assert trajectory.status is status


def test_prompt_over_the_limit_samples_nothing(byte_tokenizer):
    limits = EpisodeLimits(max_turns=2, max_response_length=64, max_context_length=3)
    trajectory, sampler, _ = play(byte_tokenizer, ["say b"], limits)
    assert trajectory.status is Status.LENGTH_LIMIT
    assert sampler.contexts == [] and trajectory.num_turns == 0


def test_turn_cut_by_the_models_window_ends_the_episode(byte_tokenizer):
    prompt_length = len(encode_text(byte_tokenizer, "question: "))
    limits = EpisodeLimits(2, max_response_length=64, max_context_length=64, max_model_length=prompt_length + 4)
    trajectory, sampler, library = play(byte_tokenizer, ["ask abcdefgh", "say b"], limits)
    assert sampler.samplings[0].max_tokens == 4
    assert trajectory.status is Status.LENGTH_LIMIT
    assert library.calls[0][1] is False  # nothing that cannot be read is looked up
    assert len(trajectory.ids) == limits.window


def test_last_turn_cut_by_the_models_window_is_a_length_limit(byte_tokenizer):
    prompt_length = len(encode_text(byte_tokenizer, "question: "))
    limits = EpisodeLimits(0, max_response_length=64, max_context_length=64, max_model_length=prompt_length + 4)
    assert play(byte_tokenizer, ["hm hm hm hm"], limits)[0].status is Status.LENGTH_LIMIT


def test_turn_cut_by_its_own_limit_is_an_invalid_action(byte_tokenizer):
    limits = EpisodeLimits(max_turns=2, max_response_length=3, max_context_length=512)
    trajectory, _, _ = play(byte_tokenizer, ["hmmmmmmmmmmm", "say", "say"], limits)
    assert trajectory.status is Status.ANSWERED
    assert trajectory.events[0]["valid"] is False


def test_sampling_of_each_turn(byte_tokenizer):
    _, sampler, _ = play(byte_tokenizer, ["ask a", "ask b", "say c"], seed=11)
    assert {s.temperature for s in sampler.samplings} == {0.7}
    assert {s.stop for s in sampler.samplings} == {("!",)}
    assert [s.seed for s in sampler.samplings] == [turn_seed(11, turn) for turn in range(3)]
    assert len({turn_seed(seed, turn) for seed in range(50) for turn in range(20)}) == 1000
    assert all(0 <= turn_seed(seed, 0) < 2**63 for seed in range(50))
    _, unseeded, _ = play(byte_tokenizer, ["say c"], seed=None)
    assert unseeded.samplings[0].seed is None


def test_turn_seed_is_the_same_on_every_machine():
    assert turn_seed(0, 0) == 1576848291327681832  # printf 0/0 | b2sum -l 64, halved


def test_a_changed_history_is_an_error(byte_tokenizer):
    class Scribbler(ScriptedSampler):
        async def generate(self, ids, sampling):
            generation = await super().generate(ids, sampling)
            ids[0] += 1
            return generation

    prompt = Prompt(encode_text(byte_tokenizer, "question: "), "test", {})
    sampler, library = Scribbler(byte_tokenizer, ["ask a", "say b"]), Library(byte_tokenizer)
    with pytest.raises(RolloutError, match="group g7: the context of turn 1 does not start with"):
        asyncio.run(run_episode(prompt, "g7", sampler, library, byte_tokenizer, Sampling(), LIMITS, 0))


@dataclass
class InterruptedSampler(ScriptedSampler):
    """Says `piece` tokens, then is interrupted; version counts how often it was asked."""

    piece: int = 3

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        line = encode_text(self.tokenizer, self.lines[0])[sampling.num_begun :]
        self.contexts.append(list(ids))
        self.samplings.append(sampling)
        ids, version = line[: min(self.piece, sampling.max_tokens)], len(self.contexts)
        if len(ids) == len(line):
            self.lines.pop(0)
        reason = "stop" if len(ids) == len(line) else "length" if len(ids) == sampling.max_tokens else INTERRUPTED
        return Generation(ids, tuple(-float(version) for _ in ids), reason, version)


def play_on(tokenizer, sampler, library, limits=LIMITS, seed=7):
    """In as many runs of an episode as it takes."""
    prompt = Prompt(encode_text(tokenizer, "question: "), "test", {})
    trajectory = None
    while trajectory is None or trajectory.status is None:
        among = (sampler, library, tokenizer, Sampling(), limits, seed)
        trajectory = asyncio.run(run_episode(prompt, "g0", *among, trajectory))
    return trajectory


def test_an_interrupted_turn_goes_on_from_its_ids_with_their_versions_and_log_probs(byte_tokenizer):
    lines = ["ask a!", "say it"]
    whole, _, _ = play(byte_tokenizer, lines)
    sampler, library = InterruptedSampler(byte_tokenizer, list(lines)), Library(byte_tokenizer)
    trajectory = play_on(byte_tokenizer, sampler, library)
    assert (trajectory.ids, trajectory.status, trajectory.events) == (whole.ids, whole.status, whole.events)
    assert (trajectory.num_turns, trajectory.num_searches, trajectory.open_turn) == (2, 1, None)
    assert library.calls == [("ask a!", True), ("say it", True)]
    turns = [segment for segment in trajectory.segments if segment.source is Source.POLICY]
    first, second = (len(encode_text(byte_tokenizer, line)) - 3 for line in lines)  # what is left after an interruption
    assert [turn.weight_versions for turn in turns] == [((1, 3), (2, first)), ((3, 3), (4, second))]
    assert [turn.log_probs for turn in turns] == [(-1.0,) * 3 + (-2.0,) * first, (-3.0,) * 3 + (-4.0,) * second]
    lengths = [len(context) for context in sampler.contexts]
    assert (lengths[1] - lengths[0], lengths[3] - lengths[2]) == (3, 3)
    assert len({sampling.seed for sampling in sampler.samplings}) == 4
    assert [sampling.max_tokens for sampling in sampler.samplings] == [64, 61, 64, 61]


@pytest.mark.parametrize("piece", [1, 2, 5])
def test_an_interrupted_turn_has_the_limits_of_a_whole_one(byte_tokenizer, piece):
    limits = EpisodeLimits(max_turns=2, max_response_length=64, max_context_length=30, max_model_length=26)
    lines = ["ask abcd!", "say something that is far too long"]
    whole, _, _ = play(byte_tokenizer, lines, limits)
    library = Library(byte_tokenizer)
    trajectory = play_on(byte_tokenizer, InterruptedSampler(byte_tokenizer, list(lines), piece=piece), library, limits)
    assert (trajectory.ids, trajectory.status) == (whole.ids, whole.status)


def test_a_pause_ends_the_wait_for_the_environment_and_the_turn_is_put_to_it_again(byte_tokenizer):
    class Slow(Library):
        is_slow = True

        async def step(self, prompt, text, tools_allowed):
            self.calls.append((text, tools_allowed))
            if self.is_slow:
                await asyncio.Event().wait()
            return await super().step(prompt, text, tools_allowed)

    sampler, library = ScriptedSampler(byte_tokenizer, ["ask a", "say b"]), Slow(byte_tokenizer)
    prompt, pause = Prompt(encode_text(byte_tokenizer, "question: "), "test", {}), Pause()
    among = (sampler, library, byte_tokenizer, Sampling(), LIMITS, 7)

    async def interrupt():
        playing = asyncio.create_task(run_episode(prompt, "g0", *among, pause=pause))
        while not library.calls:
            await asyncio.sleep(0)
        pause.begin()
        return await playing

    paused = asyncio.run(interrupt())
    assert (paused.status, paused.open_turn, paused.num_turns) == (None, "stop", 1)
    library.is_slow = False
    ended = asyncio.run(run_episode(prompt, "g0", *among, paused))
    assert ended.status is Status.ANSWERED and [event["turn"] for event in ended.events] == [0, 1]
    assert len(sampler.contexts) == 2, "what was sampled is not sampled again"


def test_a_cancelled_episode_without_a_pause_is_cancelled(byte_tokenizer):
    class Stuck(Library):
        async def step(self, prompt, text, tools_allowed):
            self.calls.append((text, tools_allowed))
            await asyncio.Event().wait()

    async def cancel():
        prompt = Prompt(encode_text(byte_tokenizer, "question: "), "test", {})
        stuck = Stuck(byte_tokenizer)
        among = (ScriptedSampler(byte_tokenizer, ["ask a"]), stuck, byte_tokenizer)
        playing = asyncio.create_task(run_episode(prompt, "g0", *among, Sampling(), LIMITS, 7))
        while not stuck.calls:
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancel())


@pytest.mark.parametrize("seed", range(40))
def test_budgets_hold_whatever_the_policy_does(byte_tokenizer, seed):
    rng = random.Random(seed)
    limits = EpisodeLimits(
        max_turns=rng.randint(0, 4),
        max_response_length=rng.randint(1, 40),
        max_context_length=rng.randint(1, 120),
        max_model_length=rng.choice([None, rng.randint(2, 120)]),
    )
    lines = [rng.choice(["ask ", "ask ", "hm ", "say "]) + "x\u00e9" * rng.randint(1, 30) for _ in range(6)]
    trajectory, sampler, library = play(byte_tokenizer, lines, limits, reply="r " * rng.randint(1, 40))
    assert trajectory.status in {Status.ANSWERED, Status.TURN_LIMIT, Status.LENGTH_LIMIT}
    assert trajectory.num_turns == len(sampler.contexts) <= limits.max_turns + 1
    assert trajectory.num_searches <= limits.max_turns
    assert all(len(context) <= limits.max_context_length for context in sampler.contexts)
    prompt_length = len(trajectory.prompt.ids)
    assert len(trajectory.ids) <= max(limits.window, prompt_length)
    for context, sampling in zip(sampler.contexts, sampler.samplings, strict=True):
        assert trajectory.ids[: len(context)] == context
        assert 0 < sampling.max_tokens <= limits.max_response_length
        assert len(context) + sampling.max_tokens <= limits.window
    policy = [segment for segment in trajectory.segments if segment.source is Source.POLICY]
    assert sum(trajectory.loss_mask) == sum(len(segment.ids) for segment in policy)


def test_decode_turn_keeps_tags_that_are_special_tokens(byte_tokenizer):
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    ids = encode_text(tokenizer, "<answer> a </answer><|endoftext|><|pad|>")
    assert decode_turn(tokenizer, ids) == "<answer> a </answer>"
