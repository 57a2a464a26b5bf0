"""Names, facts and passages: unique over worlds, told truthfully, the same every time, streamed in constant memory."""

import itertools
import tracemalloc

import pytest

from search_r1.data.tinywiki.difficulty import read_fact
from search_r1.data.tinywiki.names import WORDS, name_of
from search_r1.data.tinywiki.world import KINDS, RELATIONS, World, plan_worlds, stream_passages
from verl.errors import DataError

SIZES = {"sft": 3000, "train": 1000, "validation": 300, "test": 700}


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


def test_no_name_occurs_in_two_worlds() -> None:
    worlds = plan_worlds(0, SIZES)
    names = {key: {name for entity in range(w.num_entities) for name in w.names(entity)} for key, w in worlds.items()}
    for left, right in itertools.combinations(names.values(), 2):
        assert left.isdisjoint(right)
    assert all(len(names[key]) >= world.num_entities for key, world in worlds.items())


def test_every_name_a_passage_tells_is_of_its_own_world() -> None:
    worlds = plan_worlds(0, SIZES)
    own = {worlds["test"].title(entity) for entity in range(worlds["test"].num_entities)}
    for entity in range(worlds["test"].num_entities):
        relations = RELATIONS[worlds["test"].kind(entity)]
        told = {read_fact(worlds["test"].text(entity), relation) for relation in relations}
        assert told <= own


def test_passage_tells_its_facts_and_its_alias() -> None:
    world = plan_worlds(0, SIZES)["test"]
    for entity in range(world.num_entities):
        text = world.text(entity)
        for relation, kind in RELATIONS[world.kind(entity)].items():
            found = world.fact(entity, relation)
            assert world.kind(found) == kind
            assert read_fact(text, relation) == world.title(found)
        assert all(name in text for name in world.names(entity))
    aliases = [entity for entity in range(world.num_entities) if world.alias(entity)]
    assert aliases and {world.kind(entity) for entity in aliases} == {"country"}


def test_names_of_a_passage_share_no_word() -> None:
    world = plan_worlds(0, SIZES)["train"]
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
        count = sum(1 for _ in itertools.islice(stream_passages(worlds), 5_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 5_000
    # 5,000 rows held as dicts would take about 2 MB; a stream holds one
    assert peak < 500_000


def test_the_last_row_of_a_million_is_made_without_the_others() -> None:
    world = plan_worlds(0, {"train": 1_000_000})["train"]
    last = world.contents(999_999)
    assert last.startswith(f'"{world.title(999_999)}"')
    assert world.kind(999_999) == "book"
