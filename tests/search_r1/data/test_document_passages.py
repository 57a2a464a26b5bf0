"""How a text is cut into passages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.data.documents.passages import num_words, passages_of


def sentences(count: int, length: int) -> str:
    """`count` sentences of `length` words each."""
    return " ".join(" ".join([f"S{number}"] + ["word"] * (length - 2) + ["end."]) for number in range(count))


def test_a_short_text_is_one_passage_and_no_text_none() -> None:
    assert passages_of("  One paragraph.\n\n\n\nAnother.\n") == ["One paragraph.\nAnother."]
    assert passages_of(" \n\n\t ") == []


def test_a_passage_ends_with_a_sentence() -> None:
    passages = passages_of(sentences(30, 15))
    assert [num_words(passage) for passage in passages] == [90] * 5
    assert all(passage.startswith("S") and passage.endswith("end.") for passage in passages)


def test_a_passage_that_is_half_full_ends_with_its_paragraph() -> None:
    first, second = sentences(6, 10), sentences(8, 10)
    assert passages_of(f"{first}\n\n{second}") == [first, second]
    # One that is not is filled up with sentences of the next.
    assert [num_words(passage) for passage in passages_of(f"{sentences(4, 10)}\n\n{sentences(9, 10)}")] == [100, 30]


def test_a_small_rest_joins_the_passage_before() -> None:
    assert [num_words(passage) for passage in passages_of(sentences(12, 10))] == [120]
    assert [num_words(passage) for passage in passages_of(sentences(13, 10))] == [100, 30]


def test_a_heading_goes_with_what_follows() -> None:
    text = f"{sentences(8, 10)}\n\n## Next\n\n{sentences(8, 10)}"
    first, second = passages_of(text)
    assert first == sentences(8, 10) and second == f"## Next\n{sentences(8, 10)}"


def test_initials_and_numbers_do_not_end_a_sentence() -> None:
    text = f"{sentences(9, 10)} It was built by J. S. Aldine and nobody else in the year."
    assert passages_of(text + " " + sentences(9, 10))[1].startswith("It was built by J. S. Aldine")


def test_a_long_sentence_is_cut_at_lines_then_at_words() -> None:
    table = "\n".join(f"row {number} has five words" for number in range(60))
    passages = passages_of(table)
    assert [num_words(passage) for passage in passages] == [100, 100, 100]
    assert all(passage.endswith("words") for passage in passages)
    assert [num_words(passage) for passage in passages_of("word " * 250)] == [100, 100, 50]


@pytest.mark.parametrize(
    ("sentence", "least", "most", "ends"),
    [
        ("東京は日本の首都であり、人口は約千四百万人で、世界最大の都市圏の一つです。", 150, 250, "。"),
        ("北京是中华人民共和国的首都，也是全国的政治中心！", 150, 250, "！"),
        ("กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย มีประชากรมากกว่าสิบล้านคน ", 300, 500, ("น", "ย")),
        ("ປະເທດລາວຕັ້ງຢູ່ໃນເອເຊຍຕາເວັນອອກສຽງໃຕ້", 300, 505, ""),  # neither spaces nor signs
    ],
    ids=["Japanese", "Chinese", "Thai", "Lao"],
)
def test_scripts_without_spaces(sentence: str, least: int, most: int, ends: str | tuple[str, ...]) -> None:
    passages = passages_of(sentence * 40)
    assert all(least <= len(passage) <= most and passage.endswith(ends) for passage in passages[:-1])
    assert len(passages) > 1 and len(passages[-1]) <= 1.25 * most
    assert "".join("".join(passages).split()) == "".join((sentence * 40).split())


def test_a_vowel_sign_stays_with_its_letter() -> None:
    assert not any(
        re.match("[\u0e31\u0e34-\u0e3a\u0e47-\u0e4e]", passage) for passage in passages_of("กำลังที่นี่" * 99, 10)
    )


PIECES = [
    "word ",
    "end. ",
    "\n",
    "\n\n",
    "# Title\n",
    "東",
    "。",
    "กี",
    " ",
    "x" * 40,
    "...",
    "J. ",
    "e\u0301",
    "\u3000",
]


@given(st.lists(st.sampled_from(PIECES), max_size=400).map("".join), st.integers(10, 60))
def test_nothing_is_lost_and_no_passage_is_too_long(text: str, words: int) -> None:
    passages = passages_of(text, words)
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(passage.strip() == passage != "" for passage in passages)
    # A word that is cut, as one of 40 characters is, may count once more.
    assert all(num_words(passage) <= 1.25 * words + 2 for passage in passages)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("text", [".", "x", " ", "\n", "#\n", "東", ". ", "\n ", "# a\n"], ids=repr)
def test_time_grows_with_the_length_only(text: str) -> None:
    """So many of them take a second; time that grew with the square would take hours."""
    assert "".join("".join(passages_of(text * 300_000)).split()) == "".join(text.split()) * 300_000
