"""The imperfect demonstrator: right grammar, the observations that a search returns, choices by chance."""

import random
import re
from dataclasses import replace

import pytest

from search_r1.data.tinywiki.demonstrator import Demonstrator, Habits, PassageIndex, observation
from search_r1.data.tinywiki.questions import ChainQuestion, load_template, make_question
from search_r1.data.tinywiki.world import World, plan_worlds

POLICY_TURN = re.compile(r"<think> [^<>]+</think>(<search> [^<>]+</search>|<answer> [^<>]+</answer>)")


@pytest.fixture(scope="module")
def world() -> World:
    return plan_worlds(0, {"sft": 2000})["sft"]


@pytest.fixture(scope="module")
def index(world: World) -> PassageIndex:
    return PassageIndex([world])


def _episodes(
    world: World, index: PassageIndex, habits: Habits, hops: int, count: int
) -> list[tuple[ChainQuestion, list[tuple[str, str]]]]:
    demonstrator = Demonstrator(index, load_template(), habits)
    rng = random.Random(1)
    questions = [make_question(world, hops, rng) for _ in range(count)]
    return [(question, demonstrator.write(question, rng)) for question in questions]


def _answer(segments: list[tuple[str, str]]) -> str:
    return segments[-1][1].split("<answer> ")[1].removesuffix("</answer>")


def test_turns_alternate_and_follow_the_grammar(world: World, index: PassageIndex) -> None:
    for question, segments in _episodes(world, index, Habits(), hops=2, count=100):
        sources = [source for source, _ in segments]
        assert sources[0] == "prompt" and question.text in segments[0][1]
        assert sources[1:] == ["policy", "environment"] * (len(segments) // 2 - 1) + ["policy"]
        policy = [text for source, text in segments if source == "policy"]
        assert all(POLICY_TURN.fullmatch(text) for text in policy)
        assert all("<search>" in text for text in policy[:-1]) and "<answer>" in policy[-1]


def test_observations_are_what_the_search_returns(world: World, index: PassageIndex) -> None:
    for _, segments in _episodes(world, index, Habits(), hops=2, count=50):
        for (_, turn), (source, shown) in zip(segments[1:], segments[2:], strict=False):
            if source != "environment":
                continue
            query = turn.split("<search> ")[1].removesuffix("</search>")
            assert shown == observation(index.search([query], 1)[0])


def test_a_question_about_other_facts_is_answered_from_them(world: World, index: PassageIndex) -> None:
    """The same names in another world: a search finds the passage of that title there, by half of a name, too."""
    other = replace(world, name="other")
    index_of_other = PassageIndex([other])
    habits = Habits(start=0.5, stop=0.0, next_hop=1.0, max_searches=3)
    names = halves = 0
    for _, segments in _episodes(other, index, habits, hops=3, count=50):
        for (_, turn), (source, shown) in zip(segments[1:], segments[2:], strict=False):
            if source == "environment":
                query = turn.split("<search> ")[1].removesuffix("</search>")
                if " " in query:
                    assert shown == observation(index_of_other.search([query], 1)[0])
                    names += 1
                else:
                    assert query in shown.split('"')[1]
                    halves += 1
    assert names > 50 and halves > 10


def test_observation_bytes(world: World, index: PassageIndex) -> None:
    one, two = index.search([world.title(3)], 2)[0]
    assert one.contents == world.contents(3)
    assert observation([one, two]) == (
        f'\n\n<information>Doc 1(Title: "{world.title(3)}") {world.text(3)}\n'
        f"Doc 2(Title: {two.title}) {two.text}</information>\n\n"
    )


def test_it_often_answers_one_hop_and_seldom_two(world: World, index: PassageIndex) -> None:
    rates = {}
    for hops in (1, 2):
        episodes = _episodes(world, index, Habits(), hops, count=300)
        rates[hops] = sum(_answer(segments) in question.targets for question, segments in episodes) / len(episodes)
    assert 0.5 < rates[1] < 0.8
    assert 0.1 < rates[2] < 0.3


def test_it_stops_by_chance_whatever_was_asked(world: World, index: PassageIndex) -> None:
    habits = Habits(stop=0.6)
    for hops in (1, 2, 3):
        episodes = _episodes(world, index, habits, hops, count=400)
        stopped = sum(len(segments) == 4 for _, segments in episodes) / len(episodes)
        assert abs(stopped - habits.stop) < 0.07


def test_perfect_habits_solve_everything(world: World, index: PassageIndex) -> None:
    """So what the demonstrator lacks is only the choice of when to stop and whom to look up."""
    for hops in (2, 3):
        habits = Habits(start=1.0, stop=0.0, next_hop=1.0, max_searches=hops)
        for question, segments in _episodes(world, index, habits, hops, count=100):
            assert _answer(segments) in question.targets
