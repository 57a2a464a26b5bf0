"""The environment of a chat model that calls tools in its own format.

A turn with calls gets their results; a turn without calls, in which something is said, is the final answer. Calls that
cannot be read get an error in place of a result, which the policy can learn from. What a turn was is read from its
token ids, and what the policy reads next is written as token ids (`verl.agent.formats`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from verl.agent.environment import Episode, EpisodicEnvironment, Outcome, Turn
from verl.agent.formats import Call, CallStatus, Format, Message, ParsedTurn, format_of
from verl.agent.formats.interface import call_message
from verl.agent.messages import checked_chat
from verl.agent.text import decode_ids, encode_text
from verl.agent.tools import CallLimits, CallResult, ToolCall, ToolSet, load_tools, run_calls
from verl.agent.tools.loading import OpenTools
from verl.errors import ConfigError, DataError, translated
from verl.protocol import Prompt, Status, was_search

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config

CUT_OFF = "Your last turn was too long and was cut off. Be brief: call a tool, or give the final answer."
SAID_NOTHING = "Your last turn held neither a tool call nor an answer. Call a tool, or give the final answer."
SUMMARY_REQUEST = (
    "There is little room left. Sum up what you have found so far and what is still to be found, without calling a "
    "tool. You will go on from the question and this summary, and the results of your last calls will follow; nothing "
    "else is kept."
)
LATER = "You will read this result after your summary."
RESULTS = "The results of your last calls:"
SUMMED_UP = "What you did before, as you summed it up:"


class ChatEnvironment(EpisodicEnvironment):
    """Tools for a chat model, whose `format` says how it calls them.

    `max_invalid_turns` in a row end an episode (None: they do not): turns in which no call could be run, and nothing
    was said. Raises `ConfigError` for tools that the chat template cannot write.
    """

    summary_request = SUMMARY_REQUEST
    summary_stop_strings = ()

    def __init__(
        self,
        format: Format,
        tools: ToolSet,
        tokenizer: PreTrainedTokenizerBase,
        limits: CallLimits | None = None,
        max_invalid_turns: int | None = None,
    ) -> None:
        self.format, self.tools, self.tokenizer = format, tools, tokenizer
        self.limits, self.max_invalid_turns = limits or CallLimits(), max_invalid_turns
        self.schemas = tools.schemas()
        self.tool_names = tuple(one.name for one in tools.tools)
        self.stop_token_ids = format.stop_token_ids
        examples = [call_message(one.name, one.example) for one in tools.tools if one.example is not None]
        self.example_turns = tuple(
            decode_ids(tokenizer, format.turn({"role": "assistant", "content": "", "tool_calls": [call]}))
            for call in examples
        )

    @classmethod
    def from_config(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """See `verl.agent.environment.Environment`. Without `do_search` there are no tools."""
        agent = config.agent
        specs = agent.tools if config.do_search else []
        form = format_of(tokenizer, bool(specs), thinking=agent.thinking, options=agent.chat_template_kwargs)
        limits = CallLimits(agent.max_calls_per_turn, agent.max_calls, config.data.max_obs_length)
        return cls(form, load_tools(specs, config, tokenizer), tokenizer, limits, agent.max_invalid_turns)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """See `verl.agent.environment.Environment`. The tools are in the prompt as the chat template writes them."""
        return self.format.render(checked_chat(messages), self.schemas).ids

    async def open(self, prompt: Prompt) -> ChatEpisode:
        """See `verl.agent.environment.Environment`."""
        return ChatEpisode(self, prompt, await self.tools.open(prompt))

    def answer_turn(self, answer: str) -> str:
        """See `verl.agent.environment.Environment`."""
        return answer

    async def check(self) -> None:
        await self.tools.check()

    async def close(self) -> None:
        await self.tools.close()


class ChatEpisode(Episode):
    """The state of one episode: its messages so far, its tools, and how many turns in a row were invalid.

    A summary takes the place of its messages, but for the latest calls and their results. It stands in the prompt's
    last user message: a chat template may refuse a second one behind it.
    """

    def __init__(self, environment: ChatEnvironment, prompt: Prompt, tools: OpenTools) -> None:
        self._environment, self._prompt, self._tools = environment, prompt, tools
        self._asked: list[Message] = []  # the prompt, with the summary if there is one
        self._history: list[Message] = []  # up to the latest turn
        self._latest: tuple[Message, list[Message]] | None = None  # that turn, and what follows it
        self._num_invalid = 0

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        """Answer a turn that was made up as text of our own, after the prompt alone."""
        ids = encode_text(self._environment.tokenizer, text)
        return await self.answer(Turn(text, ids, self._prompt.ids, finished=True), tools_allowed)

    async def answer(self, turn: Turn, tools_allowed: bool) -> Outcome:
        """Run the calls of a turn at once, or end the episode with its answer."""
        environment = self._environment
        parsed = environment.format.parse(turn.ids, environment.schemas)
        said = {"reasoning": parsed.reasoning, "content": parsed.content}
        if not parsed.calls:
            if parsed.content and turn.finished:
                return Outcome("answer", valid=True, done=True, event=said | {"calls": [], "answer": parsed.content})
            feedback = SAID_NOTHING if turn.finished else CUT_OFF
            told: list[Message] = [{"role": "user", "content": feedback}]
            event = said | {"calls": [], "feedback": feedback}
            return self._outcome("invalid", event, turn, parsed, told, tools_allowed)

        # Calls that can be run are run at once; the others get an error in their place.
        results: list[CallResult | None] = [None] * len(parsed.calls)
        if tools_allowed:
            places = [place for place, call in enumerate(parsed.calls) if call.status is CallStatus.OK]
            asked = [ToolCall(parsed.calls[place].name, parsed.calls[place].arguments) for place in places]
            answers = await run_calls(self._tools, asked, environment.tokenizer, environment.limits)
            for place, result in zip(places, answers, strict=True):
                results[place] = result
        events = [call_event(call, result) for call, result in zip(parsed.calls, results, strict=True)]
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "content": result.text if result else f"Error: {call.detail}."}
            for call, result in zip(parsed.calls, results, strict=True)
        ]
        searches = [event for event in events if was_search(event)]
        any_ok = any(call.status is CallStatus.OK for call in parsed.calls)
        action = "search" if searches else "tool" if any_ok else "invalid"
        event = said | together(searches) | {"calls": events}
        return self._outcome(action, event, turn, parsed, messages, tools_allowed)

    def _outcome(
        self,
        action: str,
        event: dict[str, Any],
        turn: Turn,
        parsed: ParsedTurn,
        messages: list[Message],
        tools_allowed: bool,
    ) -> Outcome:
        """The outcome of a turn after which the episode goes on with `messages`, if it may."""
        environment, valid = self._environment, action != "invalid"
        self._num_invalid = 0 if valid else self._num_invalid + 1
        if environment.max_invalid_turns is not None and self._num_invalid >= environment.max_invalid_turns:
            return Outcome(action, valid, done=True, event=event, status=Status.TURN_LIMIT)
        if not tools_allowed:
            return Outcome(action, valid, done=False, event=event)
        if self._latest is not None:
            self._history += [self._latest[0], *self._latest[1]]
        self._latest = parsed.message(), messages
        return self._followed_by(messages, turn, Outcome(action, valid, done=False, event=event))

    def ask_for_summary(self, turn: Turn, outcome: Outcome, request: str) -> Outcome:
        """See `verl.agent.environment.Episode`. Each call gets a result that says when its own will come."""
        assert self._latest is not None
        waiting = [message | {"content": LATER} for message in map(dict, self._latest[1]) if message["role"] == "tool"]
        return self._followed_by([*waiting, {"role": "user", "content": request}], turn, outcome)

    def go_on_from(self, summary: Turn, reply: str) -> Outcome:
        """See `verl.agent.environment.Episode`. What the turn says is the summary; calls in it are not run."""
        assert self._latest is not None
        text = self._environment.format.parse(summary.ids, self._environment.schemas).content
        self._asked = _with_summary(checked_chat(self._prompt.messages), text)
        called, results = self._latest
        if not any(message["role"] == "tool" for message in results):  # feedback on a turn that is not kept
            self._latest = None
        kept = [] if self._latest is None else [called, *results]
        self._history = []
        outcome = Outcome("summary", valid=bool(text), done=False, event={"summary": text})
        try:
            return self._anew(kept, outcome)
        except ConfigError:
            if not kept:
                raise
        # The chat template refuses the calls as they were written, which is the policy's fault: their results stay.
        told = "\n\n".join(str(message["content"]) for message in results)
        self._asked = _with_summary(checked_chat(self._prompt.messages), f"{text}\n\n{RESULTS}\n{told}")
        self._latest = None
        return self._anew([], outcome)

    def _followed_by(self, messages: Sequence[Message], turn: Turn, outcome: Outcome) -> Outcome:
        """`outcome` with `messages` as what the policy reads after its latest turn.

        The context stays as it was sampled; where the format takes thinking out of it, a further sequence begins.
        """
        ids = self._environment.format.bridge((*turn.context, *turn.ids), messages)
        if ids is not None:
            return replace(outcome, reply_ids=ids, context_ids=None)
        assert self._latest is not None
        return self._anew([self._latest[0], *messages], outcome)

    def _anew(self, messages: Sequence[Message], outcome: Outcome) -> Outcome:
        """`outcome` with a context: the conversation so far, which ends with `messages`."""
        conversation = [*(self._asked or checked_chat(self._prompt.messages)), *self._history, *messages]
        with translated(DataError, lambda error: ConfigError(f"the conversation cannot be rendered anew: {error}")):
            rendered = self._environment.format.render(conversation, self._environment.schemas)
        return replace(outcome, reply_ids=None, context_ids=rendered.ids)

    async def close(self) -> None:
        await self._tools.close()


def _with_summary(messages: Sequence[Message], summary: str) -> list[Message]:
    """The messages of a prompt with the summary behind the text of the last one of the user."""
    told = f"{SUMMED_UP}\n{summary or '(nothing)'}"
    last = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        return [*messages, {"role": "user", "content": told}]
    user = {**messages[last], "content": f"{messages[last]['content']}\n\n{told}"}
    return [*messages[:last], user, *messages[last + 1 :]]


def call_event(call: Call, result: CallResult | None = None) -> dict[str, Any]:
    """What is stored about a call: how it was written, and if it was run, how it ended."""
    own = {"name": call.name, "arguments": call.arguments, "parsed": str(call.status), "span": list(call.span)}
    if result is None:
        return own | {"detail": call.detail}
    return result.event | own | {"result": result.text, "status": result.status}


def together(searches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The event of a turn with searches, for those who read one search a turn."""
    if not searches:
        return {}
    return {
        "query": "; ".join(str(one["query"]) for one in searches),
        "executed": True,
        "document_ids": [name for one in searches for name in one.get("document_ids") or ()],
        "num_found": sum(one.get("num_found") or 0 for one in searches),
        "milliseconds": max(one.get("milliseconds") or 0.0 for one in searches),
        "observation": "\n\n".join(str(one["result"]) for one in searches),
    }
