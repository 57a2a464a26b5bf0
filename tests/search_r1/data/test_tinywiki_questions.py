"""Questions: the published schema, different in every split, solvable by following the chain and not otherwise."""

import pytest

from search_r1.data.tinywiki.build import LONG, SERVED, worlds_of
from search_r1.data.tinywiki.difficulty import measure, oracle
from search_r1.data.tinywiki.passages import PassageIndex
from search_r1.data.tinywiki.questions import CHAINS, distinct_questions, load_template, prompt_row
from search_r1.data.tinywiki.world import KINDS, RELATIONS, plan_worlds
from verl.errors import DataError


def test_chains_follow_the_relations_and_cannot_be_cut_short() -> None:
    for hops, chains in CHAINS.items():
        for start, *relations in chains:
            assert len(relations) == hops and start in KINDS
            kind = start
            for number, relation in enumerate(relations):
                if number < hops - 1:
                    assert relations[-1] not in RELATIONS[kind]
                kind = RELATIONS[kind][relation]


def test_row_schema() -> None:
    world = plan_worlds(0, {"test": 700})["test"]
    question = next(distinct_questions(world, [2], 1))
    row = prompt_row(question, load_template(), "test", 7)
    assert set(row) == {"data_source", "prompt", "question", "ability", "reward_model", "extra_info"}
    assert row["question"] == question.text
    assert row["data_source"] == "tinywiki_2hop"
    assert row["ability"] == "fact-reasoning"
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": question.targets}}
    (message,) = row["prompt"]
    assert message["role"] == "user"
    assert question.text in message["content"] and "{question}" not in message["content"]
    assert question.text.endswith("?") and question.chain[0] in question.text
    info = row["extra_info"]
    assert (info["split"], info["index"], info["hops"], info["kind"]) == ("test", 7, 2, question.kind)
    assert info["chain"] == [world.title(entity) for entity in question.path[:-1]]


def test_the_answer_is_not_in_the_question() -> None:
    world = plan_worlds(0, {"test": 700})["test"]
    for question in distinct_questions(world, [1, 2, 3], 300):
        assert not any(target in question.text for target in question.targets)


def test_some_answers_have_an_alias() -> None:
    world = plan_worlds(0, {"test": 700})["test"]
    targets = [question.targets for question in distinct_questions(world, [1, 2], 300)]
    assert any(len(names) == 2 for names in targets)
    assert any(len(names) == 1 for names in targets)


def test_questions_are_distinct_and_the_same_every_time() -> None:
    world = plan_worlds(0, {"test": 700})["test"]
    texts = [question.text for question in distinct_questions(world, [1, 2, 3], 500)]
    assert len(set(texts)) == 500
    assert texts == [question.text for question in distinct_questions(world, [1, 2, 3], 500)]


def test_too_many_questions_are_refused() -> None:
    world = plan_worlds(0, {"test": 20})["test"]
    with pytest.raises(DataError, match="too few different 2-hop questions"):
        list(distinct_questions(world, [2], 500))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_oracle_solves_everything(seed: int) -> None:
    worlds = worlds_of(LONG)
    index = PassageIndex([worlds[name] for name in SERVED])
    for name in SERVED:
        questions = list(distinct_questions(worlds[name], LONG.test_hops, 200))
        assert all(oracle(questions, index)), name


def test_difficulty_shows_that_longer_questions_need_more_searches() -> None:
    table = measure(LONG)
    assert table["oracle"]["all"] == 1.0
    assert table["blind"]["all"] < 0.15
    assert table["one search, topk 1"]["1-hop"] > 0.95
    assert table["one search, topk 3"]["2-hop"] < 0.05
    assert table["one search, topk 3"]["3-hop"] < 0.05
