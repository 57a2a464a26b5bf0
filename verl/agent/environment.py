"""The two sides of an episode: the sampler of policy turns, and the environment that answers them."""

from __future__ import annotations

import inspect
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from verl.errors import ConfigError, VerlError
from verl.process.by_name import dotted_name, in_words, load_by_name
from verl.protocol import Prompt, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config


@dataclass(frozen=True)
class Sampling:
    """How one policy turn is sampled. `temperature` 0 means greedy; `max_tokens` is set per turn by the episode.

    A turn ends with a string of `stop`, with a token of `stop_token_ids`, or with EOS; each is part of the turn.

    `num_begun`: the number of ids at the end of the context that belong to this turn, if it was interrupted.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    num_begun: int = 0
    stop_token_ids: tuple[int, ...] = ()


_TAGGED = re.compile(r"<([\w-]+)>([^<]*)(?=</\1>)")
SUMMARY_TAG = "summary"
SUMMARY_REQUEST = (
    "There is little room left. Sum up what you have found so far and what is still to be found, between <summary> and "
    "</summary>. You will go on from the question, this summary and the reply to your last turn; nothing else is kept."
)
INTERRUPTED = "interrupted"
"""The `finish_reason` of an interrupted turn, which may be continued later."""


@dataclass(frozen=True)
class Generation:
    """One sampled turn, as sampled: stop strings and EOS are part of `ids`; `log_probs` are after temperature."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str  # "stop" (a stop string or EOS), "length", or INTERRUPTED
    weight_version: int = field(default=0, compare=False)  # of the weights that sampled it


class Sampler(Protocol):
    """A language model that continues token ids."""

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation: ...


@runtime_checkable
class StreamingSampler(Sampler, Protocol):
    """A sampler that can stream a turn while it is being sampled."""

    @property
    def num_running(self) -> int:
        """The number of requests that are being sampled or are queued."""
        ...

    def stream(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Generation, None]:
        """Yield the result of `generate` piece by piece; only the last piece has a `finish_reason` other than "".

        Closing the iterator, or cancelling the task that waits for it, stops the sampling.
        """
        ...

    async def check(self) -> None:
        """Raise `RolloutError` if it can no longer sample."""
        ...


def join_pieces(pieces: Sequence[Generation]) -> Generation:
    """The whole turn, from the pieces of a `StreamingSampler`."""
    ids = tuple(token for piece in pieces for token in piece.ids)
    log_probs = tuple(x for piece in pieces for x in piece.log_probs)
    return Generation(ids, log_probs, pieces[-1].finish_reason, pieces[-1].weight_version)


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, as an episode sees it.

    `text`: the turn decoded, for reading. `ids`: its token ids, with the token that ended it. `context`: the ids that
    it was sampled from. `finished`: it ended by itself, not at a limit of its length.
    """

    text: str
    ids: tuple[int, ...]
    context: tuple[int, ...]
    finished: bool


@dataclass(frozen=True)
class Outcome:
    """The environment's reply to one policy turn.

    `reply` is what the policy reads next (nothing when `done`), character by character: no control token and no other
    added token comes out of it. `action` names what the turn was ("search", "answer",
    "invalid"), `valid` says whether it followed the grammar, `event` is kept in the trajectory for people to read.

    `context`: the messages that the policy's next turn is sampled from, instead of all before it: a further sequence
    begins. Each has a "role" and a "content". They are written as the messages of a prompt file are, by the chat
    template (without one: a single message). Their contents are text, as `reply` is, which must then be empty.

    `reply_ids` and `context_ids`: the same two as token ids, from an environment that writes them itself. They are read
    as they are: control tokens in them act. `status`: how the episode ended, with `done`.
    """

    action: str
    valid: bool
    done: bool
    reply: str = ""
    event: dict[str, Any] = field(default_factory=dict)
    context: Sequence[Mapping[str, str]] | None = None
    reply_ids: tuple[int, ...] | None = None
    context_ids: tuple[int, ...] | None = None
    status: Status = Status.ANSWERED


@dataclass(frozen=True)
class PromptProblem:
    """What is wrong with a prompt file; `contradicts`: it tells the policy to write what the run does not parse."""

    found: str
    contradicts: bool


class Episode(ABC):
    """The state of one episode, which `Environment.open` begins: it answers the turns of the policy in their order."""

    @abstractmethod
    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        """Answer the policy's next turn `text`; otherwise as `Environment.step`."""

    async def answer(self, turn: Turn, tools_allowed: bool) -> Outcome:
        """Answer the policy's next turn, of which the token ids are known too. By default `step` with its text."""
        return await self.step(turn.text, tools_allowed)

    def ask_for_summary(self, turn: Turn, outcome: Outcome, request: str) -> Outcome | None:
        """What the policy reads after `turn` in place of the reply of `outcome`: a request to sum up what it has done
        and found so far. The reply waits: the policy reads it after its summary, by `go_on_from`.

        None, the default for a context that the environment gives itself: then no summary is asked for. Raises
        `ConfigError` for a reply of token ids, which only the environment that wrote it can put elsewhere.
        """
        if outcome.reply_ids is not None:
            raise ConfigError(
                "agent.compact_at holds replies back, which needs them as text, but the environment gave reply_ids: "
                "override ask_for_summary and go_on_from of its episodes, or leave agent.compact_at out"
            )
        if outcome.context is not None or outcome.context_ids is not None:
            return None
        return replace(outcome, reply=f"\n\n{request}\n\n")

    def go_on_from(self, summary: Turn, reply: str) -> Outcome:
        """What the policy reads after the turn `summary`, which was asked for in place of `reply`. A further sequence
        begins: with the `context_ids` of this outcome, or with the prompt and, behind it, its `reply`.

        An outcome that is not valid says that the turn holds no summary. The episode goes on all the same.
        """
        text = text_in_tags(summary.text, SUMMARY_TAG)
        together = f"<{SUMMARY_TAG}> {text} </{SUMMARY_TAG}>{reply}"
        return Outcome("summary", valid=bool(text), done=False, reply=together, event={"summary": text})

    async def close(self) -> None:  # noqa: B027  not every state holds something
        """Release what the episode holds: a process, a folder. It is called exactly once, however the episode ends,
        unless the process of the worker dies. What it raises is logged, and the rollout counts."""


class Environment(ABC):
    """Answers the policy's turns. A subclass must implement `step`; everything else has a default.

    One object serves all concurrent episodes of a process, so it must not keep the state of an episode. An environment
    whose episodes have state derives from `EpisodicEnvironment`.
    """

    stop_strings: tuple[str, ...] = ()
    """Strings that end a turn, unless EOS comes first; the string is part of the turn."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a turn, besides EOS; the token is part of the turn."""

    summary_request: str = SUMMARY_REQUEST
    """What asks the policy for a summary, where no `agent.summary_request` does."""

    summary_stop_strings: tuple[str, ...] = (f"</{SUMMARY_TAG}>",)
    """As `stop_strings`, for a turn that is a summary."""

    tags: tuple[str, ...] = ()
    """Strings that the policy must write literally: preflight checks that the tokenizer preserves them.

    If the tokenizer has added tokens for some, those are the only ones that can come out of a reply.
    """

    tool_names: tuple[str, ...] = ()
    """The tools that a chat model may call, in the order in which its prompt has them; preflight shows them."""

    example_turn: str = "I do not know."
    """A turn that ends an episode, if there is one: preflight and the start of training try environment and reward on
    it.
    """

    example_turns: tuple[str, ...] = ()
    """Further turns on which they try the environment, in which tools are allowed: one for each tool."""

    @classmethod
    def from_config(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """How each process constructs its environment; by default without arguments."""
        return cls()

    @abstractmethod
    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        """Answer the policy's turn `text` (decoded for reading only).

        With `tools_allowed` false (the last turn), a tool call is not executed and gets no observation.
        Raises `EnvironmentUnavailable` when infrastructure fails: the episode then ends `failed`.
        """

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
        """The token ids that an episode starts from, for the messages of a prompt, which are text from outside. None,
        the default: those of the tokenizer's chat template (see `verl.agent.messages.encode_messages`).

        Raises `DataError` for messages that cannot be written.
        """
        return None

    async def open(self, prompt: Prompt) -> Episode:
        """Begin an episode; by default one without state, whose turns `step` answers.

        Raises `EnvironmentUnavailable` when infrastructure fails: the episode then ends `failed`.
        """
        return EpisodeWithoutState(self, prompt)

    async def check(self) -> None:  # noqa: B027  nothing behind it, nothing to check
        """Called before a run: raise `EnvironmentUnavailable` if the service behind the environment cannot be reached,
        naming its address and the command that starts it."""

    async def close(self) -> None:  # noqa: B027
        """Release resources."""

    def answer_turn(self, answer: str) -> str:
        """A turn that gives `answer`: preflight and the start of training try the reward on it, with a row's gold
        answer. By default `example_turn` with the text in its last pair of tags replaced, or the answer alone.
        """
        *_, last = (None, *_TAGGED.finditer(self.example_turn))
        if last is None:
            return answer
        return f"{self.example_turn[: last.start(2)]} {answer} {self.example_turn[last.end(2) :]}"

    @classmethod
    def check_prompt_file(cls, config: Config, metadata: Mapping[str, str], prompt: str) -> PromptProblem | None:
        """What is wrong with a prompt file for this run; None if no problem is known.

        `metadata` is that of the file; `prompt` is the text of all messages of its first prompt.
        """
        return None

    @classmethod
    def files(cls, config: Config) -> dict[str, str]:
        """Text files that the environment is made from, by name. The run folder keeps a copy of each, for use where the
        file that the config names is gone.
        """
        return {}

    @classmethod
    async def sources(cls, config: Config) -> dict[str, str]:
        """What the answers come from, where no setting says it: the version of an index, say, by a name for people.

        It is saved with the state of a run, and a run that is resumed warns of what has changed. Something that cannot
        be found out is left out.
        """
        return {}

    async def probe(self, query: str) -> list[str] | None:
        """Call the tool once for real; returns the titles of the results, best first, or None if there is no such tool.

        Raises `EnvironmentUnavailable`.
        """
        return None


class EpisodicEnvironment(Environment):
    """An environment whose episodes have state: a subclass must implement `open`, and nothing else."""

    @abstractmethod
    async def open(self, prompt: Prompt) -> Episode:
        """Begin an episode: another object for each, which keeps its state."""

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        """Answer a turn as the first one of an episode of its own: preflight and the start of training try example
        turns so."""
        episode = await self.open(prompt)
        try:
            return await episode.step(text, tools_allowed)
        finally:
            await episode.close()


@dataclass(frozen=True)
class EpisodeWithoutState(Episode):
    """An episode of an environment that answers each turn by itself: it can continue in any process."""

    environment: Environment
    prompt: Prompt

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        return await self.environment.step(self.prompt, text, tools_allowed)


def text_in_tags(text: str, tag: str) -> str:
    """What stands between the tags in `text`, or where one of them is missing, from its beginning or to its end."""
    opened = text.partition(f"<{tag}>")
    return (opened[2] if opened[1] else text).partition(f"</{tag}>")[0].strip()


def checked_outcome(outcome: object, environment: Environment) -> Outcome:
    """`outcome`, which `environment` gave for a turn. Raises `ConfigError`, which says what is wrong with it."""
    gave = f"step of {dotted_name(environment)} gave"
    if not isinstance(outcome, Outcome):
        raise ConfigError(f"{gave} {reprlib.repr(outcome)}, which is no Outcome")
    for name, kind in (("reply", str), ("event", Mapping)):
        value = getattr(outcome, name)
        if not isinstance(value, kind):
            wanted = "text (str)" if kind is str else "a dictionary"
            raise ConfigError(f"{gave} an Outcome whose {name} is {reprlib.repr(value)}; make it {wanted}")
    # Metrics and reports read these as the events of tool calls.
    calls = outcome.event.get("calls") or []
    if not (isinstance(calls, Sequence) and all(isinstance(one, Mapping) for one in calls)):
        what = f"an Outcome whose event has the calls {reprlib.repr(calls)}"
        raise ConfigError(
            f"{gave} {what}; make them a list of dictionaries, one for each tool call, or use another name"
        )
    if outcome.context is not None:
        _check_messages(outcome.context, f"{gave} an Outcome with")
    # All four say what the policy reads next: of two, one would be dropped in silence.
    nexts = {"reply": outcome.reply or None}
    nexts |= {name: getattr(outcome, name) for name in ("context", "reply_ids", "context_ids")}
    if len(given := [name for name, value in nexts.items() if value is not None]) > 1:
        raise ConfigError(f"{gave} an Outcome with a {given[0]} and {given[1]}; give one, with all that comes next")
    # Ids enter the record as they are, so that they have to be plain numbers: no bools, no arrays.
    for name in ("reply_ids", "context_ids"):
        ids = nexts[name]
        if ids is not None and not (isinstance(ids, tuple) and all(type(one) is int and one >= 0 for one in ids)):
            raise ConfigError(f"{gave} an Outcome whose {name} are {reprlib.repr(ids)}; make them a tuple of token ids")
    return outcome


def _check_messages(messages: object, gave: str) -> None:
    """Raise `ConfigError` unless they are messages with a role and a content that is not empty."""
    example = '[{"role": "user", "content": "Go on."}]'
    if not (isinstance(messages, Sequence) and messages and all(isinstance(one, Mapping) for one in messages)):
        raise ConfigError(f"{gave} the context {reprlib.repr(messages)}; give messages: {example}")
    for message in messages:
        if not all(isinstance(message.get(name), str) and message[name] for name in ("role", "content")):
            raise ConfigError(f"{gave} the message {reprlib.repr(message)} in its context; write it as in {example}")


def make_environment(config: Config, tokenizer: PreTrainedTokenizerBase) -> Environment:
    """Construct the environment `agent.environment`. Raises `ConfigError`, which says what the class lacks."""
    kind = environment_class(config)
    name = dotted_name(kind)
    try:
        return kind.from_config(config, tokenizer)
    except VerlError:
        raise
    except Exception as error:
        raise ConfigError(f"agent.environment={name} cannot be made: {in_words(error)}") from error


def environment_class(config: Config) -> type[Environment]:
    """The class that `agent.environment` names, or the one for chat models (`agent.format=chat`), or for programs
    (`agent.program`). Raises `ConfigError`, which says what it lacks."""
    name = config.agent.environment
    chat = config.agent.format == "chat"
    # The class: that of programs, that of chat models in place of the default, or the one that is named.
    if config.agent.program is not None:
        kind = load_by_name("verl.agent.program.ProgramEnvironment", "agent.program")
        assert issubclass(kind, Environment)
        return kind
    if chat and name == type(config.agent).environment:
        name = CHAT_ENVIRONMENT
    kind = load_by_name(name, "agent.environment")
    # What it lacks is told here, since an instance of it could not be made, or would fail in the first episode.
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(
            f"agent.environment={name} is no environment: make it a class that derives from "
            f"{dotted_name(Environment)} and has a method `async def step(self, prompt, text, tools_allowed)`"
        )
    if kind.__abstractmethods__:
        to_write = [_TO_WRITE.get(method, f"`{method}`") for method in sorted(kind.__abstractmethods__)]
        raise ConfigError(
            f"agent.environment={name} lacks {', '.join(sorted(kind.__abstractmethods__))}: write "
            f"{', and '.join(to_write)}"
        )
    if chat and not issubclass(kind, load_by_name("verl.agent.chat.ChatEnvironment", "agent.format")):
        raise ConfigError(
            f"agent.format=chat does not work with agent.environment={name}, which reads text: derive it from "
            "verl.agent.chat.ChatEnvironment, or leave agent.environment out"
        )
    for method in _TO_WRITE:
        if not inspect.iscoroutinefunction(getattr(kind, method)):
            raise ConfigError(
                f"agent.environment={name}: {method} is a plain function; write `async def {method}`: "
                f"{_TO_WRITE[method]}"
            )
    return kind


CHAT_ENVIRONMENT = "search_r1.tools.environment.ChatSearchEnvironment"
"""The environment of a run with `agent.format=chat` that names no other."""

_TO_WRITE = {
    "step": "`async def step(self, prompt, text, tools_allowed)`, which returns an Outcome",
    "open": "`async def open(self, prompt)`, which returns an Episode",
}


SamplingMode = Literal["train", "val", "greedy"]
"""The distribution to sample from: that of training, that of validation, or greedy (always the most likely token)."""


def sampling_of(config: Config, mode: SamplingMode) -> Sampling:
    """The sampling distribution of a mode; validation is greedy unless `val_kwargs.do_sample`."""
    rollout = config.actor_rollout_ref.rollout
    if mode == "train":
        return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, ignore_eos=rollout.ignore_eos)
    validation = rollout.val_kwargs
    if mode == "greedy" or not validation.do_sample:
        return Sampling(temperature=0.0)
    return Sampling(validation.temperature, validation.top_p, validation.top_k)
