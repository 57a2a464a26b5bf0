"""Episodes that a program plays: an agent of another framework, say, which asks the policy through an endpoint.

`agent.program` is a coroutine function by its dotted name, or a command. It plays each episode with the address and the
key of a session of its own (`verl.agent.session`). How the episode ended:

- The program returned: ANSWERED, or by the limit for which a call was refused. What it returned is kept in the event of
  the turn that was sampled last, under `program`. Without an answer in it, what that turn says is the answer.
- It failed after a call was refused for a limit, or after a turn of the policy that was cut off, empty, or had a call
  that no tool takes: that is the policy's doing, and the rollout counts.
- It failed otherwise, made no call, or made none for `agent.step_timeout_s`: that is infrastructure, and the rollout is
  FAILED, neither rewarded nor trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from verl.agent.environment import (
    EpisodicEnvironment,
    Generation,
    Outcome,
    Sampler,
    Sampling,
)
from verl.agent.episode import EpisodeLimits, SelfPlayedEpisode
from verl.agent.formats import Format, format_of
from verl.agent.messages import checked_chat
from verl.agent.pause import CLOSE_S, Interrupted, Pause
from verl.agent.program_kinds import Program, ProgramFailed, ProgramTask, program_of
from verl.agent.session import Session, Sessions
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.process.by_name import in_words, load_by_name
from verl.process.event_loop import hear
from verl.protocol import Prompt, Status, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import Config


class Endpoint(ABC):
    """Serves sessions to programs, by HTTP say, in the process that samples. `agent.endpoint` names its class."""

    @abstractmethod
    async def start(self, sessions: Sessions, tokenizer: PreTrainedTokenizerBase, host: str) -> None:
        """Listen at `host`. Raises `ConfigError` if that is not possible."""

    @abstractmethod
    def base_url(self, session: str) -> str:
        """The address of the session with that name, once it has started."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening, and end all connections."""


class ProgramEnvironment(EpisodicEnvironment):
    """An environment whose episodes are played by `program`, which reaches the policy through `endpoint`."""

    example_turn = "<answer> I do not know. </answer>"

    def __init__(
        self,
        name: str,
        program: Program,
        endpoint: Endpoint,
        tokenizer: PreTrainedTokenizerBase,
        limits: EpisodeLimits,
        *,
        host: str = "127.0.0.1",
        retriever_url: str = "",
        format_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`name` is that of `program` in messages; `format_options` are those of `verl.agent.formats.format_of`, and
        this raises `ConfigError` as that does."""
        self.name, self.program = name, program
        self.sessions = Sessions()
        self._endpoint, self._host, self._retriever_url = endpoint, host, retriever_url
        self._tokenizer, self._limits = tokenizer, limits
        self._started: asyncio.Future[None] | None = None
        self._format_options = dict(format_options or {})
        self._formats: dict[bool, Format] = {}
        self.format_for(with_tools=False)

    @classmethod
    def from_config(cls, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """See `verl.agent.environment.Environment`."""
        agent = config.agent
        assert agent.program is not None
        kind = load_by_name(agent.endpoint, "agent.endpoint")
        if not (isinstance(kind, type) and issubclass(kind, Endpoint)):
            raise ConfigError(
                f"agent.endpoint={agent.endpoint} is no class that derives from {Endpoint.__module__}.Endpoint"
            )
        return cls(
            agent.program,
            program_of(agent.program, agent.program_serves),
            kind(),
            tokenizer,
            EpisodeLimits.from_config(config),
            host=agent.program_host,
            retriever_url=config.retriever.url,
            format_options={"thinking": agent.thinking, "options": agent.chat_template_kwargs},
        )

    @classmethod
    def files(cls, config: Config) -> dict[str, str]:
        """See `verl.agent.environment.Environment`. They are those of `agent.environment`: how the run's retriever was
        started, say, which `infer.py` then starts again."""
        files: dict[str, str] = load_by_name(config.agent.environment, "agent.environment").files(config)
        return files

    def format_for(self, with_tools: bool) -> Format:
        """The format of conversations. Raises `ConfigError` if the chat template has no tools."""
        if with_tools not in self._formats:
            self._formats[with_tools] = format_of(self._tokenizer, with_tools, **self._format_options)
        return self._formats[with_tools]

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """See `verl.agent.environment.Environment`. The program may begin with other messages."""
        return self.format_for(False).render(checked_chat(messages)).ids

    async def open(self, prompt: Prompt) -> ProgramEpisode:
        """See `verl.agent.environment.Environment`."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        await asyncio.shield(self._started)
        return ProgramEpisode(self, prompt)

    async def _start(self) -> None:
        """Start the endpoint, which clients in this process, and in those that it starts, reach without a proxy."""
        await self._endpoint.start(self.sessions, self._tokenizer, self._host)
        host = urlsplit(self._endpoint.base_url("")).hostname or self._host
        for name in ("NO_PROXY", "no_proxy"):
            others = [one for one in os.environ.get(name, "").split(",") if one and one != host]
            os.environ[name] = ",".join([*others, host])

    def task_of(self, session: str, key: str, prompt: Prompt) -> ProgramTask:
        """What the program gets for an episode of `prompt`."""
        return ProgramTask(self._endpoint.base_url(session), key, prompt.messages, prompt.row, self._retriever_url)

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        """Play an episode in which each turn of the policy says `text`."""
        says = _SaysOneThing(self.format_for(False).turn({"role": "assistant", "content": text}))
        trajectory = Trajectory("trial", prompt)
        episode = await self.open(prompt)
        try:
            status = await episode.play(trajectory, says, self._tokenizer, Sampling(), self._limits, None, Pause())
        finally:
            await episode.close()
        last = trajectory.events[-1]
        return Outcome(str(last["action"]), bool(last["valid"]), done=True, event=last, status=status)

    async def close(self) -> None:
        if self._started is not None:
            started, self._started = self._started, None
            await asyncio.wait([started])
            if not started.cancelled() and started.exception() is None:
                await self._endpoint.close()
        await self.program.close()


class ProgramEpisode(SelfPlayedEpisode):
    """One run of the program."""

    def __init__(self, environment: ProgramEnvironment, prompt: Prompt) -> None:
        self._environment, self._prompt = environment, prompt
        self._session: Session | None = None
        self._name = ""
        self._running: asyncio.Task[Any] | None = None

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        return await self._environment.step(self._prompt, text, tools_allowed)

    async def play(
        self,
        trajectory: Trajectory,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        limits: EpisodeLimits,
        seed: int | None,
        pause: Pause,
    ) -> Status:
        """See `SelfPlayedEpisode`. Raises what the sampler has raised, and `ConfigError` for a result that is none."""
        environment = self._environment
        # Start the program, or let the one of an interrupted episode continue with new weights.
        if self._session is None:
            self._session = Session(environment.format_for, tokenizer, sampling, limits, seed)
            self._name, key = environment.sessions.open(self._session)
            task = environment.task_of(self._name, key, self._prompt)
            self._session.go_on(sampler, pause)
            self._running = asyncio.ensure_future(environment.program.play(task))
        else:
            self._session.go_on(sampler, pause)
        session = self._session
        try:
            # Whatever ends the wait, the trajectory has the turns so far.
            with pause.ends():
                result = await self._result(session, limits.step_timeout_s)
        except Interrupted:
            await session.until_quiet()
            raise
        except ProgramFailed as error:
            return _blamed_on_policy(session, error)
        finally:
            session.write(trajectory)
        # The program has ended: its last turn is the answer, and has what the program returned.
        last = session.last_turn
        if last is None:
            words = f"the program {environment.name!r} ended without a turn of the policy"
            raise EnvironmentUnavailable(f"{words}{_refusal(session)}")
        if last["action"] == "message" and session.limit is None:
            last["action"] = "answer"
        last["program"] = checked_result(result, environment.name)
        answer = last["program"].get("answer")
        if last["action"] == "answer" or answer is not None:
            last["answer"] = str(last["content"] if answer is None else answer)
        _give_turn_rewards([session.turns[n] for n in sorted(session.turns)], last["program"], environment.name)
        session.write(trajectory)
        return session.limit or Status.ANSWERED

    async def _result(self, session: Session, limit_s: float | None) -> Any:
        """What the program returns. Raises `ProgramFailed`, what the sampler has raised, and `EnvironmentUnavailable`
        once the program has made no call for `limit_s` seconds."""
        assert self._running is not None
        # A call of the program begins its time anew, so that the time left is looked up at each change.
        while not self._running.done() and session.error is None:
            left = None if limit_s is None else limit_s - session.idle_s
            if left is not None and left <= 0:
                raise EnvironmentUnavailable(
                    f"the program {self._environment.name!r} made no call for {limit_s:g} s (agent.step_timeout_s)"
                )
            changed = asyncio.ensure_future(session.change())
            await asyncio.wait([self._running, changed], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        # If the sampler has failed, the program can only fail, too: the sampler's error is the reason.
        if session.error is not None:
            raise session.error
        try:
            return self._running.result()
        except (ProgramFailed, ConfigError, EnvironmentUnavailable):
            # These say themselves whose fault it is.
            raise
        except (Exception, asyncio.CancelledError) as error:
            raise ProgramFailed(f"the program {self._environment.name} raised {in_words(error)}") from error

    async def close(self) -> None:
        """End the program, and its session."""
        self._environment.sessions.close(self._name)
        if self._session is not None:
            await self._session.end("the rollout of this session has ended")
        if self._running is not None:
            self._running.add_done_callback(hear)
            self._running.cancel()
            await asyncio.wait([self._running], timeout=CLOSE_S)


def _blamed_on_policy(session: Session, error: ProgramFailed) -> Status:
    """The status of a rollout whose program failed for what the policy did. Raises `EnvironmentUnavailable` if it is
    not known to have."""
    last = session.last_turn
    if last is not None and (session.limit is not None or not last["valid"]):
        last["failure"] = str(error)
        return session.limit or Status.TURN_LIMIT
    raise EnvironmentUnavailable(f"{error}{_refusal(session)}") from error


def _refusal(session: Session) -> str:
    return f"; a call was refused: {session.refusal}" if session.refusal else ""


def _give_turn_rewards(turns: Sequence[dict[str, Any]], result: Mapping[str, Any], program: str) -> None:
    """Put the `turn_rewards` of a result into the events of the turns, in the order of their calls. Raises
    `ConfigError`."""
    rewards = result.get("turn_rewards") or []
    numbers = isinstance(rewards, list) and all(isinstance(one, int | float) for one in rewards)
    if not numbers or len(rewards) > len(turns):
        raise ConfigError(
            f"the program {program!r} returned the turn_rewards {reprlib.repr(rewards)}; make them a list of at most "
            f"{len(turns)} numbers, one for each of its calls"
        )
    for event, reward in zip(turns, rewards, strict=False):
        event["turn_reward"] = reward


def checked_result(result: Any, program: str) -> dict[str, Any]:
    """What a program returned, as a mapping: a number is its `reward`, a text its `answer`. Raises `ConfigError` for
    what is neither, and for a reward that is no finite number."""
    if result is None:
        return {}
    if isinstance(result, str):
        return {"answer": result}
    if isinstance(result, Mapping):
        # It is stored as JSON: the reward reads now what a reader of the file will get.
        try:
            return dict(json.loads(json.dumps(result, allow_nan=False)))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the program {program!r} returned {reprlib.repr(result)}, which JSON has no form for: {error}"
            ) from error
    if isinstance(result, int | float):
        # As a mapping, in which a number that is not finite is refused.
        return checked_result({"reward": float(result)}, program)
    raise ConfigError(
        f"the program {program!r} returned {reprlib.repr(result)}; return nothing, a number (the reward), a text (the "
        "answer), or a dictionary with them as `reward` and `answer`"
    )


@dataclass(frozen=True)
class _SaysOneThing:
    """A sampler whose turns are all the same."""

    turn: tuple[int, ...]
    log_prob: float = field(default=-1.0)

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        turn = self.turn[: sampling.max_tokens]
        finished = len(turn) == len(self.turn)
        return Generation(turn, (self.log_prob,) * len(turn), "stop" if finished else "length")
