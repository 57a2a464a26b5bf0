"""The world of TinyWiki: its names, facts and passages, and questions that only its chain of facts answers."""

import itertools
import tracemalloc

import pytest

from search_r1.data.tinywiki.build import CHAT_RECIPE, LONG, SERVED, Recipe, worlds_of
from search_r1.data.tinywiki.demonstrator import PassageIndex
from search_r1.data.tinywiki.difficulty import measure, oracle, read_fact
from search_r1.data.tinywiki.questions import CHAINS, distinct_questions, load_template, prompt_row
from search_r1.data.tinywiki.world import KINDS, RELATIONS, WORDS, World, name_of, plan_worlds, stream_passages
from verl.errors import DataError

SIZES = {"sft": 3000, "train": 1000, "validation": 300, "test": 700}


@pytest.fixture(scope="module")
def worlds() -> dict[str, World]:
    return plan_worlds(0, SIZES)


@pytest.fixture(scope="module")
def world(worlds: dict[str, World]) -> World:
    return worlds["test"]


def test_names_are_a_bijection_even_as_word_sets() -> None:
    num_two_words = len(WORDS) * (len(WORDS) - 1) // 2
    names = [name_of(slot, seed=3) for slot in range(num_two_words + 20_000)]
    assert len({frozenset(name.split()) for name in names}) == len(names)
    assert all(len(set(name.split())) == len(name.split()) for name in names)
    assert {len(name.split()) for name in names[:num_two_words]} == {2}
    assert {len(name.split()) for name in names[num_two_words:]} == {3}


def test_seed_changes_names_and_facts() -> None:
    one, two = (plan_worlds(seed, SIZES)["test"] for seed in (0, 1))
    assert one.title(5) != two.title(5)
    birthplaces = [[world.fact(person, "birthplace") for person in world.entities("person")] for world in (one, two)]
    assert birthplaces[0] != birthplaces[1]


def test_no_name_occurs_in_two_worlds(worlds: dict[str, World]) -> None:
    names = {key: {name for entity in range(w.num_entities) for name in w.names(entity)} for key, w in worlds.items()}
    for left, right in itertools.combinations(names.values(), 2):
        assert left.isdisjoint(right)
    assert all(len(names[key]) >= world.num_entities for key, world in worlds.items())


def test_passage_tells_its_facts_and_its_alias(world: World) -> None:
    for entity in range(world.num_entities):
        text = world.text(entity)
        for relation, kind in RELATIONS[world.kind(entity)].items():
            found = world.fact(entity, relation)
            assert found < world.num_entities and world.kind(found) == kind
            assert read_fact(text, relation) == world.title(found)
        assert all(name in text for name in world.names(entity))
    aliases = [entity for entity in range(world.num_entities) if world.alias(entity)]
    assert aliases and {world.kind(entity) for entity in aliases} == {"country"}


def test_names_of_a_passage_share_no_word(worlds: dict[str, World]) -> None:
    world = worlds["train"]
    for entity in range(world.num_entities):
        told = [world.fact(entity, relation) for relation in RELATIONS[world.kind(entity)]]
        words = [word for number in (entity, *told) for word in world.title(number).split()]
        assert len(words) == len(set(words))


def test_rows_are_wiki18_rows_with_running_ids() -> None:
    worlds = plan_worlds(0, {"train": 50, "test": 30})
    rows = list(stream_passages(list(worlds.values())))
    assert [row["id"] for row in rows] == [str(number) for number in range(80)]
    title, text = rows[50]["contents"].split("\n")
    assert title == f'"{worlds["test"].title(0)}"'
    assert text.startswith(worlds["test"].title(0))
    assert rows == list(stream_passages(list(worlds.values())))


def test_kinds_cover_a_world() -> None:
    world = World("test", seed=0, num_entities=37, first_slot=0)
    covered = [entity for kind in KINDS for entity in world.entities(kind)]
    assert covered == list(range(37))


def test_a_world_too_small_is_refused() -> None:
    with pytest.raises(DataError, match="19 entities"):
        plan_worlds(0, {"train": 19})


def test_a_large_world_streams_in_bounded_memory() -> None:
    worlds = list(plan_worlds(0, {"train": 1_000_000}).values())
    tracemalloc.start()
    try:
        count = sum(1 for _ in itertools.islice(stream_passages(worlds), 1_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 1_000
    assert peak < 100_000  # 1,000 rows held as dicts would take 400,000 bytes; a stream holds one


def test_the_last_row_of_a_million_is_made_without_the_others() -> None:
    world = plan_worlds(0, {"train": 1_000_000})["train"]
    last = world.contents(999_999)
    assert last.startswith(f'"{world.title(999_999)}"')
    assert world.kind(999_999) == "book"


# --- questions


def test_chains_follow_the_relations_and_cannot_be_cut_short() -> None:
    for hops, chains in CHAINS.items():
        for start, *relations in chains:
            assert len(relations) == hops and start in KINDS
            kind = start
            for number, relation in enumerate(relations):
                if number < hops - 1:
                    assert relations[-1] not in RELATIONS[kind]
                kind = RELATIONS[kind][relation]


def test_row_schema(world: World) -> None:
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


def test_the_answer_is_not_in_the_question_and_may_have_an_alias(world: World) -> None:
    questions = list(distinct_questions(world, [1, 2, 3], 300))
    assert not any(target in question.text for question in questions for target in question.targets)
    assert {len(question.targets) for question in questions} == {1, 2}


def test_questions_are_distinct_and_the_same_every_time(world: World) -> None:
    texts = [question.text for question in distinct_questions(world, [1, 2, 3], 500)]
    assert len(set(texts)) == 500
    assert texts == [question.text for question in distinct_questions(world, [1, 2, 3], 500)]


def test_too_many_questions_are_refused() -> None:
    world = plan_worlds(0, {"test": 20})["test"]
    with pytest.raises(DataError, match="too few different 2-hop questions"):
        list(distinct_questions(world, [2], 500))


@pytest.mark.parametrize("recipe", [LONG, CHAT_RECIPE], ids=["tags", "chat"])
def test_oracle_solves_everything(recipe: Recipe) -> None:
    worlds = worlds_of(recipe)
    index = PassageIndex([worlds[name] for name in SERVED])
    for name in SERVED:
        questions = list(distinct_questions(worlds[name], (*recipe.test_hops, *recipe.kinds), 200))
        assert all(oracle(questions, index)), name


def test_difficulty_shows_that_longer_questions_need_more_searches() -> None:
    table = measure(LONG)
    assert table["oracle"]["all"] == 1.0
    assert table["blind"]["all"] < 0.15
    assert table["one search, topk 1"]["1hop"] > 0.95
    assert table["one search, topk 3"]["2hop"] < 0.05
    assert table["one search, topk 3"]["3hop"] < 0.05


def test_difficulty_shows_what_one_search_finds_for_each_kind_of_chat_question() -> None:
    table = measure(CHAT_RECIPE)
    assert set(table["oracle"].values()) == {1.0} and len(table["oracle"]) == 7
    assert table["one search, topk 1"]["page"] == table["one search, topk 1"]["unanswerable"] == 0.0
    assert 0.3 < table["one search, topk 1"]["comparison"] < 0.7  # the title of one of the two
    assert table["blind"]["unanswerable"] == 1.0  # it knows which questions have no answer
