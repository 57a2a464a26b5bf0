"""Each fault of a retriever in an episode: it passes and leaves no trace, or the episode fails and says why.

Most of them cost time in which nothing happens: all are played at once, and each test looks at its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from chaos_world import RIVERS, assert_no_error_text, lines_about, make_environment, play, playing
from fault_proxy import FINAL, PASSING, FaultProxy, Kind, Request, Rule, healthy, scripted

from verl.protocol import Source, Status, Trajectory

FIRST, SECOND = "river Ildra", "river Sonne"
SCRIPT = lines_about(FIRST, SECOND, answer="Sonneburg")
ENDLESS: tuple[Kind, ...] = ("error_500", "busy_503", "reset", "cut", "silence")
OUTAGES: tuple[Kind, ...] = ("silence", "reset", "busy_503")
PLENTY_S = 20.0  # more than a deadline is exceeded by on a busy machine


class World:
    """The server, and what disturbed episodes have left: the proxy, the trajectories, the seconds that they took."""

    def __init__(self, url: str, tokenizer: Any) -> None:
        self.url, self.tokenizer = url, tokenizer

    async def play(
        self, rule: Rule, scripts: Sequence[Sequence[str]] = (SCRIPT,), **times: Any
    ) -> tuple[FaultProxy, list[Trajectory], float]:
        with FaultProxy(self.url, rule, delay_s=0.2) as proxy:
            started = time.monotonic()
            found = await playing(make_environment(proxy.url, self.tokenizer, **times), self.tokenizer, scripts)
        return proxy, found, time.monotonic() - started

    async def outage(self, kind: Kind, seconds: float, timeout_s: float, deadline_s: float) -> Any:
        """It begins with the second request: the second search of one of the episodes, or the first of another."""
        began: list[float] = []

        def rule(request: Request) -> Kind:
            if request.number == 2:
                began.append(time.monotonic())
            return kind if began and time.monotonic() < began[0] + seconds else "none"

        scripts = [SCRIPT, lines_about("river Tavik"), SCRIPT]
        _, trajectories, _ = await self.play(rule, scripts, timeout_s=timeout_s, deadline_s=deadline_s)
        return trajectories, time.monotonic() - began[0]

    async def too_long_an_outage(self) -> Any:
        """All four episodes wait for the server at once; then it is back."""
        scripts = [SCRIPT, lines_about("Tavik"), lines_about("Morra"), SCRIPT]
        with FaultProxy(self.url, lambda request: "reset") as proxy:
            environment = make_environment(proxy.url, self.tokenizer, deadline_s=4.0)
            started = time.monotonic()
            failed = await playing(environment, self.tokenizer, scripts)
            seconds = time.monotonic() - started
            proxy.rule = healthy
            return failed, seconds, await playing(environment, self.tokenizer, [SCRIPT])

    async def death(self) -> Any:
        """While a request waits for it: the connection is reset, later ones are refused."""

        def rule(request: Request) -> Kind:
            if FIRST in request.queries:
                return "none"
            proxy.die()  # as soon as the request has begun to wait
            return "silence"

        with FaultProxy(self.url, rule) as proxy:
            return proxy, await playing(
                make_environment(proxy.url, self.tokenizer, deadline_s=4.0), self.tokenizer, [SCRIPT]
            )


def at_once(plays: dict[Any, Awaitable[Any]]) -> dict[Any, Any]:
    """What each of them returned, or its exception."""

    async def main() -> list[Any]:
        return await asyncio.gather(*plays.values(), return_exceptions=True)

    return dict(zip(plays, asyncio.run(main()), strict=True))


@pytest.fixture(scope="module")
def world(library_url: str, byte_tokenizer: Any) -> World:
    return World(library_url, byte_tokenizer)


@pytest.fixture(scope="module")
def played(world: World, undisturbed: Trajectory) -> Callable[..., Any]:
    """What has become of an episode. An undisturbed one has come before: the first one takes longer."""
    plays: dict[Any, Awaitable[Any]] = {"too long": world.too_long_an_outage(), "death": world.death()}
    for kind in (*PASSING, "silence"):
        plays["passes", kind] = world.play(scripted(kind, kind), timeout_s=1.0 if kind == "silence" else 30.0)
    for kind in FINAL:
        plays["final", kind] = world.play(scripted("none", kind))
        plays["batch", kind] = world.play(scripted(kind), [lines_about(f"river {r}") for r in RIVERS], max_batch=4)
    for kind in ENDLESS:
        plays["endless", kind] = world.play(endless(kind), timeout_s=1.0, deadline_s=4.0)
    for kind in OUTAGES:  # a twentieth of 30 s, with the time of a request in the same proportion
        plays["outage", kind] = world.outage(kind, 1.5, timeout_s=0.5, deadline_s=15.0)
    found = at_once(plays)

    def get(*key: str) -> Any:
        one = found[key if len(key) > 1 else key[0]]
        if isinstance(one, BaseException):
            raise one
        return one

    return get


def endless(kind: Kind) -> Rule:
    return lambda request: kind if SECOND in request.queries else "none"


@pytest.fixture(scope="module")
def undisturbed(world: World) -> Trajectory:
    """The episode without a proxy."""
    (trajectory,) = play(make_environment(world.url, world.tokenizer), world.tokenizer, [SCRIPT])
    assert trajectory.status is Status.ANSWERED and trajectory.num_searches == 2
    return trajectory


def assert_same(trajectory: Trajectory, expected: Trajectory) -> None:
    assert (trajectory.status, trajectory.failure) == (Status.ANSWERED, None)
    assert trajectory.segments == expected.segments
    found, wanted = ([{**event, "milliseconds": 0} for event in t.events] for t in (trajectory, expected))
    assert found == wanted
    counters = (trajectory.num_turns, trajectory.num_valid_actions, trajectory.num_searches)
    assert counters == (expected.num_turns, expected.num_valid_actions, expected.num_searches) == (3, 3, 2)


@pytest.mark.parametrize("kind", [*PASSING, "silence"])
def test_what_passes_leaves_no_trace(kind: Kind, played: Callable[..., Any], undisturbed: Trajectory) -> None:
    """The first two requests meet the fault, the third asks the first query again; then the second query."""
    proxy, (trajectory,), _ = played("passes", kind)
    assert_same(trajectory, undisturbed)
    # a delay within the time of an attempt is an answer like any other
    met, well = ([FIRST, SECOND], []) if kind == "delay" else ([FIRST, FIRST], [FIRST, SECOND])
    asked = [request.queries[0] for _, request in proxy.seen]
    if kind == "silence":  # a slow machine is silent for longer than that now and then
        asked = asked[:2] + list(dict.fromkeys(asked[2:]))
    assert asked == met + well and proxy.count(kind) == 2


@pytest.mark.parametrize("kind", FINAL)
def test_an_answer_that_is_none_fails_the_episode(kind: Kind, played: Callable[..., Any], byte_tokenizer: Any) -> None:
    """At its second search. What came before it stays as it was."""
    proxy, (trajectory,), _ = played("final", kind)
    assert_failed(trajectory, byte_tokenizer, f"{proxy.url} answered 200 but not with a retrieval reply")
    assert len(proxy.seen) == 2, "the client asked again"


@pytest.mark.parametrize("kind", FINAL)
def test_one_spoilt_answer_to_many_searches_fails_none(kind: Kind, played: Callable[..., Any]) -> None:
    """Four episodes ask different things in one request; then its halves are asked for."""
    proxy, trajectories, _ = played("batch", kind)
    assert [len(request.queries) for _, request in proxy.seen] == [4, 2, 2]
    assert [trajectory.status for trajectory in trajectories] == [Status.ANSWERED] * 4
    assert [trajectory.events[0]["document_ids"] for trajectory in trajectories] == [[river] for river in RIVERS]


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_does_not_pass_fails_the_episode_at_its_deadline(
    kind: Kind, played: Callable[..., Any], byte_tokenizer: Any
) -> None:
    proxy, (trajectory,), seconds = played("endless", kind)
    assert seconds < 4.0 + PLENTY_S
    assert_failed(trajectory, byte_tokenizer, f"retriever {proxy.url} is not available")
    assert proxy.count(kind) >= 2, "it was tried once only"


def assert_failed(trajectory: Trajectory, tokenizer: Any, failure: str) -> None:
    """At the second of two searches: prompt, turn, observation, turn; one search counted."""
    assert trajectory.status is Status.FAILED and failure in (trajectory.failure or "")
    sources = [segment.source for segment in trajectory.segments]
    assert sources == [Source.PROMPT, Source.POLICY, Source.ENVIRONMENT, Source.POLICY]
    assert (trajectory.num_turns, trajectory.num_valid_actions, trajectory.num_searches) == (2, 1, 1)
    assert trajectory.reward is None
    assert_no_error_text(trajectory, tokenizer)


@pytest.mark.parametrize("kind", OUTAGES)
def test_an_outage_shorter_than_the_deadline_is_survived(
    kind: Kind, played: Callable[..., Any], undisturbed: Trajectory
) -> None:
    assert_survived(*played("outage", kind), undisturbed, 1.5, deadline_s=15.0)


@pytest.mark.slow
def test_an_outage_of_30_seconds_is_survived_with_the_default_times(world: World, undisturbed: Trajectory) -> None:
    found = at_once({kind: world.outage(kind, 30.0, timeout_s=10.0, deadline_s=60.0) for kind in OUTAGES})
    for trajectories, lost_s in found.values():
        assert_survived(trajectories, lost_s, undisturbed, 30.0, deadline_s=60.0)


def assert_survived(
    trajectories: list[Trajectory], lost_s: float, undisturbed: Trajectory, seconds: float, deadline_s: float
) -> None:
    assert seconds <= lost_s < deadline_s
    for trajectory in (trajectories[0], trajectories[2]):
        assert_same(trajectory, undisturbed)
    assert trajectories[1].status is Status.ANSWERED


def test_an_outage_longer_than_the_deadline_fails_what_waits_then_it_goes_on(
    played: Callable[..., Any], byte_tokenizer: Any, undisturbed: Trajectory
) -> None:
    """Those that wait fail at the same time; the next ones are whole again."""
    failed, seconds, (after,) = played("too long")
    assert seconds < 4.0 + PLENTY_S
    for trajectory in failed:
        assert trajectory.status is Status.FAILED and (trajectory.num_turns, trajectory.num_searches) == (1, 0)
        assert_no_error_text(trajectory, byte_tokenizer)
    assert_same(after, undisturbed)


def test_a_server_that_dies_for_ever(played: Callable[..., Any], byte_tokenizer: Any) -> None:
    proxy, (trajectory,) = played("death")
    assert_failed(trajectory, byte_tokenizer, f"retriever {proxy.url} is not available")
    assert "Connect call failed" in (trajectory.failure or "")
    assert "start one with: bash retrieval_launch.sh" in (trajectory.failure or "")
