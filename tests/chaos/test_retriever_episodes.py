"""Each fault of a retriever in an episode: it passes and leaves no trace, or the episode fails and says why."""

from __future__ import annotations

import time
from typing import Any

import pytest
from chaos_world import RIVERS, assert_no_error_text, lines_about, make_environment, play
from fault_proxy import FINAL, PASSING, FaultProxy, Kind, Request, healthy, scripted

from verl.protocol import Source, Status, Trajectory

FIRST, SECOND = "river Ildra", "river Sonne"
SCRIPT = lines_about(FIRST, SECOND, answer="Sonneburg")


@pytest.fixture(scope="module")
def undisturbed(library_url: str, byte_tokenizer: Any) -> Trajectory:
    """The episode without a proxy."""
    (trajectory,) = play(make_environment(library_url, byte_tokenizer), byte_tokenizer, [SCRIPT])
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
def test_what_passes_leaves_no_trace(
    kind: Kind, library_url: str, byte_tokenizer: Any, undisturbed: Trajectory
) -> None:
    """The first two requests meet the fault, the third asks the first query again; then the second query."""
    timeout_s = 1.0 if kind == "silence" else 30.0
    with FaultProxy(library_url, scripted(kind, kind), delay_s=0.2) as proxy:
        (trajectory,) = play(make_environment(proxy.url, byte_tokenizer, timeout_s), byte_tokenizer, [SCRIPT])
    assert_same(trajectory, undisturbed)
    # a delay within the time of an attempt is an answer like any other
    met, well = ([FIRST, SECOND], []) if kind == "delay" else ([FIRST, FIRST], [FIRST, SECOND])
    asked = [request.queries[0] for _, request in proxy.seen]
    if kind == "silence":  # a slow machine is silent for longer than that now and then
        asked = asked[:2] + list(dict.fromkeys(asked[2:]))
    assert asked == met + well and proxy.count(kind) == 2


@pytest.mark.parametrize("kind", FINAL)
def test_an_answer_that_is_none_fails_the_episode(kind: Kind, library_url: str, byte_tokenizer: Any) -> None:
    """At its second search. What came before it stays as it was."""
    with FaultProxy(library_url, scripted("none", kind)) as proxy:
        (trajectory,) = play(make_environment(proxy.url, byte_tokenizer), byte_tokenizer, [SCRIPT])
        assert_failed(trajectory, byte_tokenizer, f"{proxy.url} answered 200 but not with a retrieval reply")
    assert len(proxy.seen) == 2, "the client asked again"


@pytest.mark.parametrize("kind", FINAL)
def test_one_spoilt_answer_to_many_searches_fails_none(
    kind: Kind, library_url: str, byte_tokenizer: Any, undisturbed: Trajectory
) -> None:
    """Four episodes ask different things in one request; then its halves are asked for."""
    scripts = [lines_about(f"river {river}") for river in RIVERS]
    with FaultProxy(library_url, scripted(kind)) as proxy:
        environment = make_environment(proxy.url, byte_tokenizer, max_batch=4)
        trajectories = play(environment, byte_tokenizer, scripts)
    assert [len(request.queries) for _, request in proxy.seen] == [4, 2, 2]
    assert [trajectory.status for trajectory in trajectories] == [Status.ANSWERED] * 4
    assert [trajectory.events[0]["document_ids"] for trajectory in trajectories] == [[river] for river in RIVERS]


@pytest.mark.parametrize("kind", ["error_500", "busy_503", "reset", "cut", "silence"])
def test_what_does_not_pass_fails_the_episode_at_its_deadline(
    kind: Kind, library_url: str, byte_tokenizer: Any
) -> None:
    with FaultProxy(library_url, lambda request: kind if SECOND in request.queries else "none") as proxy:
        environment = make_environment(proxy.url, byte_tokenizer, timeout_s=1.0, deadline_s=4.0)
        started = time.monotonic()
        (trajectory,) = play(environment, byte_tokenizer, [SCRIPT])
        assert time.monotonic() - started < 4.0 + 20
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


@pytest.mark.parametrize("kind", ["silence", "reset", "busy_503"])
def test_an_outage_shorter_than_the_deadline_is_survived(
    kind: Kind, library_url: str, byte_tokenizer: Any, undisturbed: Trajectory
) -> None:
    """A twentieth of 30 s, with the time of a request in the same proportion."""
    assert_survived(1.5, kind, library_url, byte_tokenizer, undisturbed, timeout_s=0.5, deadline_s=15.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silence", "reset", "busy_503"])
def test_an_outage_of_30_seconds_is_survived_with_the_default_times(
    kind: Kind, library_url: str, byte_tokenizer: Any, undisturbed: Trajectory
) -> None:
    assert_survived(30.0, kind, library_url, byte_tokenizer, undisturbed, timeout_s=10.0, deadline_s=60.0)


def assert_survived(
    seconds: float, kind: Kind, url: str, tokenizer: Any, undisturbed: Trajectory, timeout_s: float, deadline_s: float
) -> None:
    """It begins with the second request: the second search of one of the episodes, or the first of another."""
    began: list[float] = []

    def rule(request: Request) -> Kind:
        if request.number == 2:
            began.append(time.monotonic())
        return kind if began and time.monotonic() < began[0] + seconds else "none"

    with FaultProxy(url, rule) as proxy:
        environment = make_environment(proxy.url, tokenizer, timeout_s, deadline_s)
        trajectories = play(environment, tokenizer, [SCRIPT, lines_about("river Tavik"), SCRIPT])
    lost_s = time.monotonic() - began[0]
    print(f"an outage of {seconds:g} s ({kind}) cost {lost_s:.1f} s; {proxy.count(kind)} requests met it")
    assert seconds <= lost_s < deadline_s
    for trajectory in (trajectories[0], trajectories[2]):
        assert_same(trajectory, undisturbed)
    assert trajectories[1].status is Status.ANSWERED


def test_an_outage_longer_than_the_deadline_fails_what_waits_then_it_goes_on(
    library_url: str, byte_tokenizer: Any, undisturbed: Trajectory
) -> None:
    """All four episodes wait for the server at once and fail at the same time; the next ones are whole again."""
    with FaultProxy(library_url, lambda request: "reset") as proxy:
        environment = make_environment(proxy.url, byte_tokenizer, deadline_s=4.0)
        started = time.monotonic()
        failed = play(environment, byte_tokenizer, [SCRIPT, lines_about("Tavik"), lines_about("Morra"), SCRIPT])
        assert time.monotonic() - started < 4.0 + 20
        proxy.rule = healthy
        (after,) = play(environment, byte_tokenizer, [SCRIPT])
    for trajectory in failed:
        assert trajectory.status is Status.FAILED and (trajectory.num_turns, trajectory.num_searches) == (1, 0)
        assert_no_error_text(trajectory, byte_tokenizer)
    assert_same(after, undisturbed)


def test_a_server_that_dies_for_ever(library_url: str, byte_tokenizer: Any) -> None:
    """While a request waits for it: the connection is reset, later ones are refused."""

    def rule(request: Request) -> Kind:
        if FIRST in request.queries:
            return "none"
        proxy.die()  # as soon as the request has begun to wait
        return "silence"

    with FaultProxy(library_url, rule) as proxy:
        environment = make_environment(proxy.url, byte_tokenizer, deadline_s=4.0)
        (trajectory,) = play(environment, byte_tokenizer, [SCRIPT])
        assert_failed(trajectory, byte_tokenizer, f"retriever {proxy.url} is not available")
    assert "Connect call failed" in (trajectory.failure or "")
    assert "start one with: bash retrieval_launch.sh" in (trajectory.failure or "")
