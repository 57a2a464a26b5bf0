"""The environment of a chat model that calls tools in its own format.

A turn with calls gets their results; a turn without calls, in which something is said, is the final answer. Calls that
cannot be read get an error in place of a result, which the policy can learn from. What a turn was is read from its
token ids, and what the policy reads next is written as token ids (`verl.agent.formats`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class ChatEnvironment(EpisodicEnvironment):
    """Tools for a chat model, whose `format` says how it calls them.

    `max_invalid_turns` in a row end an episode (None: they do not): turns in which no call could be run, and nothing
    was said. Raises `ConfigError` for tools that the chat template cannot write.
    """

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
    """The state of one episode: its messages so far, its tools, and how many turns in a row were invalid."""

    def __init__(self, environment: ChatEnvironment, prompt: Prompt, tools: OpenTools) -> None:
        self._environment, self._prompt, self._tools = environment, prompt, tools
        self._history: list[Message] = []
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
        events = [_event(call, result) for call, result in zip(parsed.calls, results, strict=True)]
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "content": result.text if result else f"Error: {call.detail}."}
            for call, result in zip(parsed.calls, results, strict=True)
        ]
        searches = [event for event in events if was_search(event)]
        any_ok = any(call.status is CallStatus.OK for call in parsed.calls)
        action = "search" if searches else "tool" if any_ok else "invalid"
        event = said | _together(searches) | {"calls": events}
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
        # The context stays as it was sampled; where the format takes thinking out of it, a further sequence begins.
        self._history += [parsed.message(), *messages]
        ids = environment.format.bridge((*turn.context, *turn.ids), messages)
        if ids is not None:
            return Outcome(action, valid, done=False, event=event, reply_ids=ids)
        conversation = [*checked_chat(self._prompt.messages), *self._history]
        with translated(DataError, lambda error: ConfigError(f"the conversation cannot be rendered anew: {error}")):
            rendered = environment.format.render(conversation, environment.schemas)
        return Outcome(action, valid, done=False, event=event, context_ids=rendered.ids)

    async def close(self) -> None:
        await self._tools.close()


def _event(call: Call, result: CallResult | None) -> dict[str, Any]:
    """What is stored about a call: how it was written, and if it was run, how it ended."""
    own = {"name": call.name, "arguments": call.arguments, "parsed": str(call.status), "span": list(call.span)}
    if result is None:
        return own | {"detail": call.detail}
    return result.event | own | {"result": result.text, "status": result.status}


def _together(searches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
