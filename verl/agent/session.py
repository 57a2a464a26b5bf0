"""The calls of a program to the policy, recorded as the sequences of one rollout.

A program that plays an episode by itself sends conversations, as messages or as token ids, and gets the policy's next
turn for each. What the policy saw is recorded as it was sampled: where the messages of a call go on from an earlier
reply, the ids up to that reply stay, and only the new messages are written behind them (`Format.bridge`). So the
program's text is never read back into ids that the policy has sampled.

A call goes on from the longest conversation that it begins with. If that is the end of a sequence, the sequence grows.
Otherwise a further one begins: for another conversation (a sub-agent's, say), for one that was shortened or changed,
for a second continuation of the same reply, and where thinking has to leave the context. Calls may be made at once.

While the rollout is interrupted, calls wait; a turn that was cut by it is continued where it ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from verl.agent.chat import call_event, together
from verl.agent.environment import INTERRUPTED, Generation, Sampler, Sampling
from verl.agent.episode import EpisodeLimits, turn_seed
from verl.agent.formats import CallStatus, Format, Message, ParsedTurn, Tool
from verl.agent.pause import Pause
from verl.agent.text import decode_turn
from verl.errors import ConfigError, DataError
from verl.process.by_name import in_words
from verl.process.event_loop import end_all
from verl.protocol import Segment, Source, Status, Trajectory, searches_of, was_search

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNREADABLE = (CallStatus.INVALID_JSON, CallStatus.UNCLOSED, CallStatus.MISSING_NAME)


class CallRefused(Exception):
    """A call that gets no turn. `code` says why, for programs: one of `REFUSALS`; `field`: where in the call."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code, self.field = code, field


INVALID, TOO_LONG, TURN_LIMIT = "invalid_request", "context_length_exceeded", "turn_limit"
UNKNOWN_KEY, IS_OVER, FAILED = "invalid_api_key", "session_over", "engine_failed"
REFUSALS = (INVALID, TOO_LONG, TURN_LIMIT, UNKNOWN_KEY, IS_OVER, FAILED)
_LIMITS = {TOO_LONG: Status.LENGTH_LIMIT, TURN_LIMIT: Status.TURN_LIMIT}


@dataclass(frozen=True)
class PolicyCall:
    """A call for the policy's next turn, after `messages`, or after the token `ids` of a program that writes them.

    `max_tokens`: the most that are sampled, where the run allows more. `stop`: strings that end the turn. `answered`:
    by the place of a tool's result in `messages`, which call of its turn it answers, counted from 0; other results
    answer the calls in their order.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()
    ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    answered: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """The policy's turn: its `ids` as they were sampled after those of `context`, with their log-probs.

    `message` says it, in the form of `Message`, up to a string of `stop`. A call that cannot be read stands in its
    content as text.
    """

    context: tuple[int, ...]
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    message: dict[str, Any]
    finish_reason: str  # "stop", "length" or "tool_calls"


@dataclass(eq=False)
class _Sequence:
    """One sequence so far: `ids` are those of `segments`. `open`: the turn that is being sampled at its end."""

    segments: list[Segment] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    open: _OpenTurn | None = None


@dataclass(frozen=True)
class _Reply:
    """A reply that a call may go on from: it ends the first `length` ids of `sequence`; `event` is that of its turn."""

    sequence: _Sequence
    length: int
    event: dict[str, Any]
    message: Message

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.sequence.ids[: self.length])


@dataclass
class _OpenTurn:
    """A turn that is being sampled at the end of `sequence`, after further ids of its `context`. `digest`: that of the
    conversation before it; b"" behind token ids."""

    sequence: _Sequence
    context: tuple[int, ...]
    digest: bytes = b""
    sampled: Segment = field(default_factory=lambda: Segment(Source.POLICY, (), ()))
    finish_reason: str = ""

    @property
    def segments(self) -> list[Segment]:
        source = Source.ENVIRONMENT if self.sequence.segments else Source.CONTEXT
        return [one for one in (Segment(source, self.context), self.sampled) if one.ids]


class Session:
    """The calls of one program, for one rollout. `format_for(with_tools)` gives the format of conversations.

    `limit`: the status of the rollout if it ends now, since a call was refused for its length or for the number of
    turns, and none was answered after it. `error`: what the sampler has raised. Each is None if there is no such thing.
    `refusal`: why the latest call was refused, if one was. `turns`: the event of each turn by the number of its call,
    in the order in which they ended.
    """

    def __init__(
        self,
        format_for: Callable[[bool], Format],
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        limits: EpisodeLimits,
        seed: int | None,
    ) -> None:
        self._format_for, self._tokenizer = format_for, tokenizer
        self._sampling, self._limits, self._seed = sampling, limits, seed
        self._sequences: list[_Sequence] = []
        self._replies: dict[bytes, _Reply] = {}  # by the digest of the conversation that it ends
        self._num_calls = 0
        self._in_engine: set[asyncio.Future[Generation]] = set()
        self._changed = asyncio.Event()
        self._since = time.monotonic()
        self._over = ""
        self.turns: dict[int, dict[str, Any]] = {}
        self.limit: Status | None = None
        self.error: BaseException | None = None
        self.refusal = ""

    @property
    def last_turn(self) -> dict[str, Any] | None:
        """The event of the turn that ended last."""
        return next(reversed(self.turns.values()), None)

    # What the player of the rollout does.

    def go_on(self, sampler: Sampler, pause: Pause) -> None:
        """Sample from now on with `sampler`, until `pause` begins. Calls that waited for it go on."""
        self._sampler, self._pause, self._since = sampler, pause, time.monotonic()
        self._tell()

    async def until_quiet(self) -> None:
        """Wait until no turn is in the engine, after `pause` has begun."""
        while self._in_engine:
            await self.change()

    async def end(self, why: str) -> None:
        """Refuse calls from now on, also those that wait, and end the turns that are being sampled."""
        self._over = why
        self._tell()
        await end_all(self._in_engine)

    @property
    def idle_s(self) -> float:
        """For how many seconds the program has made no call that waits for a turn."""
        is_waiting = any(sequence.open for sequence in self._sequences)
        return 0.0 if is_waiting else time.monotonic() - self._since

    def write(self, trajectory: Trajectory) -> None:
        """Make `trajectory` the record of the calls so far: sequence by sequence, in the order in which they began.

        Turns that an interruption has cut are in it. Without any turn, it is left as it is.
        """
        segments: list[Segment] = []
        events: list[dict[str, Any]] = []
        for sequence in self._sequences:
            segments += sequence.segments
            events += sequence.events
            # A turn that is still being sampled has an event with its text alone: nothing has read it yet.
            if sequence.open is not None and sequence.open.sampled.ids:
                segments += sequence.open.segments
                events.append({"text": decode_turn(self._tokenizer, sequence.open.sampled.ids)})
        if not segments:
            return
        # A record begins with a prompt: here, with what its first sequence begins with.
        trajectory.segments = [replace(segments[0], source=Source.PROMPT), *segments[1:]]
        trajectory.events = [{"turn": number} | event for number, event in enumerate(events)]
        trajectory.num_turns = len(events)
        trajectory.num_valid_actions = sum(bool(event.get("valid")) for event in events)
        trajectory.num_searches = sum(len(searches_of(event)) for event in events)
        trajectory.weight_version = max((version for version, _ in trajectory.weight_versions), default=0)

    # What the program does.

    async def complete(self, call: PolicyCall) -> Completion:
        """The policy's next turn. Cancelled, it leaves no trace, but counts as a turn. Raises `CallRefused`."""
        try:
            # Refuse a call beyond the limits, or one that cannot be written; the program reads the reason.
            self._check_open()
            if self._num_calls > self._limits.max_turns:
                raise CallRefused(TURN_LIMIT, f"this rollout has had its {self._num_calls} turns (max_turns)")
            form = self._format_for(bool(call.tools))
            placed = self._placed(call, form)
            max_tokens = self._max_tokens(call, len(placed.sequence.ids) + len(placed.context))
        except CallRefused as error:
            self.limit = self.limit or _LIMITS.get(error.code)
            self.refusal = str(error)
            raise
        except (DataError, ConfigError) as error:
            self.refusal = str(error)
            raise CallRefused(INVALID, str(error), "tools" if isinstance(error, ConfigError) else "messages") from error
        except RecursionError as error:
            self.refusal = "the arguments of a call in the messages are nested too deeply"
            raise CallRefused(INVALID, self.refusal, "messages") from error
        # While the turn is sampled, its sequence is open: a call that runs beside it cannot continue the same one.
        number, self._num_calls = self._num_calls, self._num_calls + 1
        sequence = placed.sequence
        if not sequence.segments:
            self._sequences.append(sequence)
        sequence.open = placed
        try:
            await self._sample(placed, number, max_tokens, call.stop, form.stop_token_ids)
            return self._recorded(call, form, placed, number)
        finally:
            sequence.open = None
            if not sequence.segments:
                self._sequences.remove(sequence)
            self._since = time.monotonic()
            self._tell()

    def _max_tokens(self, call: PolicyCall, length: int) -> int:
        limits = self._limits
        most = min(limits.max_response_length, limits.window - length)
        if length > limits.max_context_length or most <= 0:
            longest = min(limits.max_context_length, limits.window - 1)
            raise CallRefused(TOO_LONG, f"the context has {length} tokens, and this run takes {longest}", "messages")
        return min(most, call.max_tokens or most)

    def _placed(self, call: PolicyCall, form: Format) -> _OpenTurn:
        """The call as a turn to be sampled: at the end of a sequence, or at the beginning of a further one.

        Raises `CallRefused`, and `DataError` for messages that the chat template cannot write.
        """
        if call.ids is not None:
            return self._placed_ids(call.ids)
        messages, digests = list(call.messages), list(_digests(call))
        if not messages:
            raise CallRefused(INVALID, "there are no messages", "messages")
        latest = max((n for n, digest in enumerate(digests[:-1]) if digest in self._replies), default=None)
        if latest is not None:
            reply, following = self._replies[digests[latest]], messages[latest + 1 :]
            _tell_results(reply.event, following, {n - latest - 1: place for n, place in call.answered.items()})
            if all(message["role"] in ("user", "tool") for message in following):
                more = form.bridge(reply.ids, following)
                if more is not None and len(reply.sequence.ids) == reply.length and reply.sequence.open is None:
                    return _OpenTurn(reply.sequence, more, digests[-1])
                if more is not None:
                    return _OpenTurn(_Sequence(), (*reply.ids, *more), digests[-1])
        # Replies are written with their thinking, which most programs do not send back.
        own = [
            self._replies[digest].message if digest in self._replies else message
            for message, digest in zip(messages, digests, strict=True)
            if message["content"] or message["role"] != "system"
        ]
        return _OpenTurn(_Sequence(), form.render(own, call.tools).ids, digests[-1])

    def _placed_ids(self, ids: tuple[int, ...]) -> _OpenTurn:
        if not ids:
            raise CallRefused(INVALID, "there are no token ids", "prompt")
        known = len(self._tokenizer)
        if wrong := next((one for one in ids if not 0 <= one < known), None):
            raise CallRefused(INVALID, f"the tokenizer has no token {wrong}; its ids end at {known - 1}", "prompt")
        for sequence in reversed(self._sequences):
            length = len(sequence.ids)
            if sequence.open is None and length < len(ids) and list(ids[:length]) == sequence.ids:
                return _OpenTurn(sequence, ids[length:])
        return _OpenTurn(_Sequence(), ids)

    async def _sample(
        self, turn: _OpenTurn, number: int, max_tokens: int, stop: tuple[str, ...], stop_ids: tuple[int, ...]
    ) -> None:
        """Sample the turn to its end, over interruptions. Raises `CallRefused` if the rollout or the sampler ends."""
        while turn.finish_reason in ("", INTERRUPTED):
            while self._pause.has_begun and not self._over:
                await self.change()
            self._check_open()
            # After an interruption the engine continues behind the tokens that it had sampled.
            begun = turn.sampled.ids
            sampling = replace(
                self._sampling,
                max_tokens=max_tokens - len(begun),
                stop=stop,
                stop_token_ids=stop_ids,
                seed=None if self._seed is None else turn_seed(self._seed, number, len(begun)),
                num_begun=len(begun),
            )
            context = [*turn.sequence.ids, *turn.context, *begun]
            generating = asyncio.ensure_future(self._sampler.generate(context, sampling))
            self._in_engine.add(generating)
            try:
                generation = await generating
            except asyncio.CancelledError:
                self._check_open()
                raise
            except Exception as error:
                self.error = error
                raise CallRefused(FAILED, f"the engine failed: {in_words(error)}") from error
            finally:
                self._in_engine.discard(generating)
                self._tell()
            # Each part of the turn keeps the version of the weights that sampled it.
            ids, version = tuple(generation.ids), generation.weight_version
            further = Segment(Source.POLICY, ids, tuple(generation.log_probs), ((version, len(ids)),) if ids else ())
            turn.sampled, turn.finish_reason = turn.sampled.extended(further), generation.finish_reason

    def _recorded(self, call: PolicyCall, form: Format, turn: _OpenTurn, number: int) -> Completion:
        """Append the turn of this call to its sequence."""
        sequence, sampled = turn.sequence, turn.sampled
        context = (*sequence.ids, *turn.context)
        sequence.segments += turn.segments
        sequence.ids += [*turn.context, *sampled.ids]
        finished, text = turn.finish_reason == "stop", decode_turn(self._tokenizer, sampled.ids)
        # A program that writes token ids reads the turn by itself: here it is a text without calls.
        parsed = ParsedTurn("", text, ()) if call.ids is not None else form.parse(sampled.ids, call.tools)
        event = {"text": text} | _event(parsed, finished)
        sequence.events.append(event)
        self.turns[number] = event
        # A call was answered, so that an earlier refusal is not what ends the rollout.
        self.limit = None
        message = _message(parsed, text, call.stop)
        # A later call that begins with this conversation finds the reply, and goes on from it.
        if call.ids is None:
            self._replies[_digest(turn.digest, message)] = _Reply(sequence, len(sequence.ids), event, message)
        reason = "tool_calls" if finished and "tool_calls" in message else "stop" if finished else "length"
        assert sampled.log_probs is not None
        return Completion(context, sampled.ids, sampled.log_probs, message, reason)

    def _check_open(self) -> None:
        if self._over:
            raise CallRefused(IS_OVER, self._over)
        if self.error is not None:
            raise CallRefused(FAILED, f"the engine failed: {in_words(self.error)}")

    def _tell(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until a call has ended, or something else has changed."""
        await self._changed.wait()


class Sessions:
    """The sessions that programs may call, each by a name, and a key that opens no other one."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, Session]] = {}

    def open(self, session: Session) -> tuple[str, str]:
        """Let calls with a new name and key reach the session; returns the two."""
        name, key = secrets.token_hex(8), f"session-{secrets.token_urlsafe(24)}"
        self._open[name] = (key, session)
        return name, key

    def find(self, name: str, key: str) -> Session:
        """The session of that name. Raises `CallRefused` for a key that is not its own, and if there is none."""
        if name not in self._open:
            raise CallRefused(IS_OVER, "there is no session of that address; its rollout has ended")
        expected, session = self._open[name]
        if not hmac.compare_digest(expected.encode(), key.encode()):
            raise CallRefused(
                UNKNOWN_KEY, "the API key is not that of this session; use the one that came with its address"
            )
        return session

    def close(self, name: str) -> None:
        self._open.pop(name, None)


def _digests(call: PolicyCall) -> Iterable[bytes]:
    """A digest for each message: of the conversation up to it, tools included, as far as programs send it back."""
    digest = hashlib.blake2b(json.dumps(call.tools, sort_keys=True).encode(), digest_size=16).digest()
    for message in call.messages:
        digest = _digest(digest, message)
        yield digest


def _digest(before: bytes, message: Message) -> bytes:
    """The digest of the conversation with the digest `before`, followed by `message`."""
    content = str(message["content"])
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    told = [message["role"], content.strip() if message["role"] == "assistant" else content, calls]
    return hashlib.blake2b(before + json.dumps(told, sort_keys=True).encode(), digest_size=16).digest()


def _message(parsed: ParsedTurn, text: str, stop: Sequence[str]) -> dict[str, Any]:
    """The turn as the message that the program gets: up to a string of `stop`, which the last token may reach past.

    With a call that cannot be read, the content is the whole `text`, and has that call in it.
    """
    message = parsed.message()
    unreadable = [call for call in parsed.calls if call.status in _UNREADABLE]
    if unreadable:
        readable = [call for call in parsed.calls if call.status not in _UNREADABLE]
        message = replace(parsed, content=text.strip(), reasoning="", calls=tuple(readable)).message()
    content = message["content"]
    ends = [place for place in map(content.find, stop) if place >= 0]
    return message | {"content": content[: min(ends, default=len(content))]}


def _event(parsed: ParsedTurn, finished: bool) -> dict[str, Any]:
    """What is stored about a turn, in the form of a turn of `verl.agent.chat`; one without calls is a "message"."""
    calls = [call_event(call) for call in parsed.calls]
    said = {"reasoning": parsed.reasoning, "content": parsed.content, "calls": calls}
    if calls:
        valid = all(call.status is CallStatus.OK for call in parsed.calls)
        return said | {"action": "tool" if valid else "invalid", "valid": valid}
    speaks = bool(parsed.content) and finished
    return said | {"action": "message" if speaks else "invalid", "valid": speaks}


def _tell_results(event: dict[str, Any], following: Sequence[Message], answered: Mapping[int, int]) -> None:
    """Add to the event of a turn what the program has sent after it; `answered` as in `PolicyCall`, for `following`.

    A call with an argument `query` that got a result counts as a search.
    """
    # The program has only the calls that can be read.
    calls = [call for call in event["calls"] if call["parsed"] not in _UNREADABLE]
    results = {n: str(message["content"]) for n, message in enumerate(following) if message["role"] == "tool"}
    places = {answered[n]: result for n, result in results.items() if n in answered}
    in_order = iter([result for n, result in results.items() if n not in answered])
    for place, call in enumerate(calls):
        result = places[place] if place in places else next(in_order, None)
        if result is None:
            continue
        query = call["arguments"].get("query")
        call |= {"result": result, "status": "ok"} | ({"query": query} if isinstance(query, str) else {})
    if not event["calls"]:
        event["feedback"] = "\n\n".join(str(message["content"]) for message in following)
    searches = [call for call in event["calls"] if was_search(call)]
    if searches:
        event |= together(searches) | {"action": "search"}
