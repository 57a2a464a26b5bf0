"""A written policy plays an episode, and the episode becomes a row of the warm start.

The policy follows a plan of queries and answers what it has read. Everything else is that of a run: the episode is
played by `run_episode` in the run's environment, so prompt, observations and limits are exactly what a trained policy
would see, token by token.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from search_r1.data.corpus.answer_matching import AnswerMatcher, AnswerTokens, answer_tokens, names
from search_r1.data.episodes.queries import Plan, Thoughts, plans_of
from search_r1.llm_agent.grammar import Grammar
from search_r1.rewards.metrics import exact_match
from verl.agent.environment import Environment, Generation, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.formats import Format, Message, write_conversation
from verl.agent.formats.interface import call_message
from verl.agent.messages import Messages, checked_chat, encode_messages
from verl.agent.text import decode_ids, encode_outside
from verl.errors import DataError, EnvironmentUnavailable
from verl.protocol import Prompt, Status, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"<[^<>]*>")
NOT_FOUND = "the answer is not in what was found"
NOT_NAMED = "a later title is not named by what was found before"
YES_OR_NO = "the answer is yes or no, which no passage says"
IN_QUESTION = "the answer is in the question"
NO_PLAN = "no strategy fits the question"
LONG_PROMPT = "the prompt is longer than data.max_start_length"
LONG_TURN = "a turn is longer than data.max_response_length"


class LeftOut(Exception):
    """Why no row is made of a question, or of a question by one plan."""


@dataclass(frozen=True)
class Asked:
    """A question with its messages, gold answers, and the titles of its gold passages in order."""

    question: str
    messages: Messages
    golden_answers: Sequence[str]
    titles: Sequence[str] = ()
    data_source: str = "questions"


class Turns(Protocol):
    """How the policy of a format writes its turns, as token ids."""

    def search(self, thought: str, query: str) -> tuple[int, ...]: ...

    def answer(self, thought: str, answer: str) -> tuple[int, ...]: ...

    def row(self, trajectory: Trajectory) -> dict[str, Any]:
        """What `verl.trainer.sft` reads: the columns of a row."""
        ...


@dataclass(frozen=True)
class TagTurns:
    """Turns in tags; without thoughts where `thinks` is false. A row has `segments` with the ids of the episode."""

    tokenizer: PreTrainedTokenizerBase
    grammar: Grammar
    thinks: bool = True

    def search(self, thought: str, query: str) -> tuple[int, ...]:
        tag = self.grammar.search
        return self._turn(thought, f"<{tag}> {query} </{tag}>")

    def answer(self, thought: str, answer: str) -> tuple[int, ...]:
        written = self.grammar.example_answer(thought, answer)
        return self._turn(thought, written.partition(f"</{self.grammar.think}>")[2])

    def _turn(self, thought: str, action: str) -> tuple[int, ...]:
        think = self.grammar.think
        text = f"<{think}> {thought} </{think}>{action}" if self.thinks else action
        return encode_outside(self.tokenizer, text, self.grammar.tags)

    def row(self, trajectory: Trajectory) -> dict[str, Any]:
        # The text is what the tokenizer makes of the ids by itself (some remove spaces), by which training knows it.
        return {
            "segments": [
                {"source": one.source.value, "text": str(self.tokenizer.decode(list(one.ids))), "ids": list(one.ids)}
                for one in trajectory.segments
            ]
        }


class ChatTurns:
    """Turns with tool calls, as the format of a chat model writes them. A row has `messages` and `tools`."""

    def __init__(self, form: Format, schemas: Sequence[dict[str, Any]], answer_tag: str) -> None:
        self._format, self._schemas, self._tag = form, schemas, answer_tag
        # Where a thought may stand beside a call: not every chat template has a place for it.
        self._place = next((place for place in ("reasoning_content", "content") if self._keeps(place)), None)

    def search(self, thought: str, query: str) -> tuple[int, ...]:
        return self._format.turn(self._message(thought, query))

    def answer(self, thought: str, answer: str) -> tuple[int, ...]:
        said = f"<{self._tag}> {answer} </{self._tag}>"
        if self._place == "reasoning_content":
            return self._format.turn({"role": "assistant", "content": said, "reasoning_content": thought})
        return self._format.turn({"role": "assistant", "content": f"{thought} {said}"})

    def row(self, trajectory: Trajectory) -> dict[str, Any]:
        """Raises `DataError` if the messages would be trained with other ids than those of the episode."""
        messages: list[Message] = [*checked_chat(trajectory.prompt.messages)]
        # The episode as a conversation: for each event what the policy said, then the results of its calls.
        for number, event in enumerate(trajectory.events):
            said: dict[str, Any] = {"role": "assistant", "content": event["content"]}
            if event["reasoning"]:
                said["reasoning_content"] = event["reasoning"]
            calls = [call_message(call["name"], call["arguments"]) for call in event["calls"]]
            if calls:
                said["tool_calls"] = [{"id": f"call_{number}"} | call for call in calls]
            messages.append(said)
            messages += [
                {"role": "tool", "tool_call_id": f"call_{number}", "name": call["name"], "content": call["result"]}
                for call in event["calls"]
            ]
        # Training writes these messages by the chat template again, which may change or drop a part of a turn.
        written = write_conversation(self._format, messages, self._schemas)
        if [token for sequence in written for part in sequence for token in part.ids] != list(trajectory.ids):
            raise DataError(
                "the chat template writes the conversation otherwise than the episode was; use --format tags"
            )
        return {"messages": [_in_parquet(message) for message in messages], "tools": json.dumps(self._schemas)}

    def _message(self, thought: str, query: str, place: str | None = None) -> dict[str, Any]:
        message = {"role": "assistant", "content": "", "tool_calls": [call_message("search", {"query": query})]}
        where = place or self._place
        return message | {where: thought} if where else message

    def _keeps(self, place: str) -> bool:
        """Whether a thought in this field is read back from the turn, and the call with it."""
        message = self._message("I look it up.", "a query", place)
        try:
            read = self._format.parse(self._format.turn(message), self._schemas).message()
        except DataError:
            return False
        return read == message


def _in_parquet(message: Message) -> dict[str, Any]:
    """The arguments of calls as JSON text: as a struct, they would have the fields of all rows."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return dict(message) | ({"tool_calls": calls} if calls else {})


@dataclass
class PlannedPolicy:
    """Writes the queries of a plan one after the other, then the gold answer that it has read.

    It raises `LeftOut` where it would have to write something that it cannot know: an answer or a further title that
    stands neither in the question nor in what it has read.
    """

    plan: Plan
    asked: Asked
    turns: Turns
    thoughts: Thoughts
    rng: random.Random
    tokenizer: PreTrainedTokenizerBase
    _read: str = ""
    _num_turns: int = 0
    _end: int | None = None  # of its latest turn, in the context

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """The next turn, as `verl.agent.environment.Sampler` gives it."""
        if self._end is not None:
            self._read += _TAG.sub(" ", decode_ids(self.tokenizer, ids[self._end :])) + "\n"
        turn = self._turn()
        if len(turn) > sampling.max_tokens:
            raise LeftOut(LONG_TURN)
        self._num_turns += 1
        self._end = len(ids) + len(turn)
        return Generation(turn, (0.0,) * len(turn), "stop")

    def _turn(self) -> tuple[int, ...]:
        if self._num_turns == len(self.plan.queries):
            answer = answer_in(self._read, self.asked.golden_answers)
            return self.turns.answer(self.thoughts.draw("answer", self.rng, answer=answer), answer)
        query = self.plan.queries[self._num_turns]
        if self._num_turns and not names(f"{self.asked.question} {self._read}", query):
            raise LeftOut(NOT_NAMED)
        place = "next" if self._num_turns else "search"
        return self.turns.search(self.thoughts.draw(place, self.rng, query=query), query)


def answer_in(text: str, golden_answers: Sequence[str]) -> str:
    """The first gold answer that the text contains, as the text writes it if that is an exact match too.

    Raises `LeftOut` if it contains none.
    """
    by_tokens: dict[AnswerTokens, str] = {answer_tokens(answer): answer for answer in reversed(golden_answers)}
    found = AnswerMatcher(by_tokens).find(answer_tokens(text))
    answer = next((answer for tokens, answer in reversed(by_tokens.items()) if tokens in found), None)
    if answer is None:
        raise LeftOut(NOT_FOUND)
    words = r"\W{1,3}".join(map(re.escape, re.findall(r"\w+", answer)))
    written = re.search(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE) if words else None
    return written[0] if written and "\n" not in written[0] and exact_match(written[0], [answer]) else answer


@dataclass
class EpisodeWriter:
    """Makes rows of questions, in the environment and within the limits of a run."""

    environment: Environment
    tokenizer: PreTrainedTokenizerBase
    limits: EpisodeLimits
    max_start_length: int
    turns: Turns
    strategies: Sequence[str]
    thoughts: Thoughts = field(default_factory=Thoughts)

    async def write(self, asked: Asked, rng: random.Random) -> dict[str, Any]:
        """The row of a question, with its `strategy`: the first one in a random order by which the answer is found.

        Raises `LeftOut` with the reason if there is none, and `EnvironmentUnavailable` if the retriever does not answer
        within its deadline.
        """
        _check_answers(asked)
        # The ids that an episode starts from: those of the environment, if it writes prompts in a way of its own.
        ids = self.environment.prompt_ids(asked.messages)
        ids = ids or tuple(encode_messages(self.tokenizer, asked.messages, self.environment.tags))
        if len(ids) > self.max_start_length:
            raise LeftOut(LONG_PROMPT)
        prompt = Prompt(ids, asked.data_source, {"question": asked.question}, messages=asked.messages)
        plans = plans_of(asked.question, asked.titles, self.strategies)
        plans = [plan for plan in plans if len(plan.queries) <= self.limits.max_turns]
        # If every plan fails, the reason of the last one is given.
        reason = LeftOut(NO_PLAN)
        for plan in rng.sample(plans, len(plans)):
            try:
                trajectory = await self._play(prompt, plan, asked, rng)
            except LeftOut as error:
                reason = error
                continue
            row = self.turns.row(trajectory)
            return row | {"data_source": asked.data_source, "question": asked.question, "strategy": plan.strategy}
        raise reason

    async def _play(self, prompt: Prompt, plan: Plan, asked: Asked, rng: random.Random) -> Trajectory:
        policy = PlannedPolicy(plan, asked, self.turns, self.thoughts, rng, self.tokenizer)
        played = await run_episode(
            prompt, "", policy, self.environment, self.tokenizer, Sampling(), self.limits, seed=None
        )
        if played.status is Status.FAILED:
            raise EnvironmentUnavailable(played.failure)
        # What the environment has read, in place of what was meant: a query may look like a tag.
        queries = [event.get("query") for event in played.events[:-1]]
        if played.status is not Status.ANSWERED:
            raise LeftOut(f"the episode reaches a limit: {played.status}")
        if queries != [query.strip() for query in plan.queries] or len(played.sequences) > 1:
            raise LeftOut("the environment reads other queries than were meant")
        return played


def _check_answers(asked: Asked) -> None:
    answers = [answer_tokens(answer) for answer in asked.golden_answers]
    if any(answer in (("yes",), ("no",)) for answer in answers):
        raise LeftOut(YES_OR_NO)
    if AnswerMatcher(answers).find(answer_tokens(asked.question)):
        raise LeftOut(IN_QUESTION)
