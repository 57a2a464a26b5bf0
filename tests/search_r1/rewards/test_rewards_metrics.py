"""Normalisation and metrics: a table of hard cases by hand, laws, and agreement with torchmetrics' SQuAD metric."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.text import squad

from search_r1.rewards.efficiency_components import count_words, has_cjk
from search_r1.rewards.metrics import (
    contains_gold,
    cover_bag,
    cover_match,
    cover_tokens,
    exact_match,
    normalize_answer,
    normalize_r1_searcher,
    normalize_unicode,
    token_f1,
)

# prediction, targets, exact match, F1, cover match
HARD = [
    # articles
    ("the Beatles", ["Beatles"], 1, 1, 1),
    ("Beatles, The", ["the beatles"], 1, 1, 1),
    ("An Officer and a Gentleman", ["Officer and Gentleman"], 1, 1, 1),
    ("theatre", ["the atre"], 0, 0, 1),  # "atre" is a part of the text
    # punctuation
    ("U.S.A.", ["USA"], 1, 1, 1),
    ("U S A", ["USA"], 0, 0, 0),
    ("Jean-Luc", ["JeanLuc"], 1, 1, 1),
    ("Jean-Luc", ["Jean Luc"], 0, 0, 0),
    ("O'Brien!", ["obrien"], 1, 1, 1),
    ("a-ha", ["aha"], 1, 1, 1),  # the hyphen goes first: no article is left
    # unicode: ASCII only, unless asked for
    ("\u201cRome\u201d", ["Rome"], 0, 0, 1),
    ("Beyonc\u00e9", ["Beyonce"], 0, 0, 0),
    ("\u0130stanbul", ["istanbul"], 0, 0, 0),  # lower case of a dotted capital I is two characters
    ("\u5317\u4eac", ["\u5317\u4eac\u5e02"], 0, 0, 0),
    ("\u5317\u4eac\u5e02", ["\u5317\u4eac"], 0, 0, 1),
    # numbers
    ("1,000", ["1000"], 1, 1, 1),
    ("1.5", ["15"], 1, 1, 1),  # the SQuAD rule has no decimal point
    ("1969", ["69"], 0, 0, 1),
    ("July 20, 1969", ["20 July 1969"], 0, 1, 0),
    ("in 1969", ["July 1969"], 0, 0.5, 0),  # 1 of 2 and 1 of 2
    ("$5", ["5"], 1, 1, 1),
    # empty
    ("", ["Rome"], 0, 0, 0),
    ("the", ["Rome"], 0, 0, 0),
    ("", [""], 0, 0, 0),
    ("", ["A"], 0, 0, 0),
    ("The", ["A"], 0, 0, 0),
    ("a", ["A"], 1, 1, 1),
    (" a ", ["A"], 1, 1, 1),
    ("a grade", ["A"], 0, 0, 0),
    ("?", ["?"], 1, 1, 1),
    ("Rome", [], 0, 0, 0),
    # several targets
    ("NYC", ["New York", "NYC"], 1, 1, 1),
    ("New York City", ["NYC", "New York"], 0, 0.8, 1),  # 2 of 3 and 2 of 2
    ("Rome and Milan", ["Rome", "Milan, Italy"], 0, 0.5, 1),  # 1 of 3 and 1 of 1; the other has 1 of 3 and 1 of 2
    ("A", ["Rome", "A"], 1, 1, 1),
    # words that stand twice count twice
    ("New York New York", ["New York"], 0, 2 / 3, 1),  # 2 of 4 and 2 of 2
    ("New York", ["New York New York"], 0, 2 / 3, 0),
    ("La La Land", ["La La"], 0, 0.8, 1),  # 2 of 3 and 2 of 2
    # yes and no are right or wrong as a whole
    ("yes", ["yes"], 1, 1, 1),
    ("Yes.", ["yes"], 1, 1, 1),
    ("yes it is", ["yes"], 0, 0, 1),
    ("no", ["no way"], 0, 0, 0),
    ("noanswer", ["noanswer here"], 0, 0, 0),
    ("no", ["no one", "no"], 1, 1, 1),
    ("no one", ["no", "one"], 0, 2 / 3, 1),
    ("now", ["no"], 0, 0, 1),
]


@pytest.mark.parametrize(("prediction", "targets", "exact", "f1", "cover"), HARD)
def test_hard_cases(prediction, targets, exact, f1, cover):
    assert exact_match(prediction, targets) is bool(exact)
    assert token_f1(prediction, targets) == pytest.approx(f1, abs=1e-12)
    assert cover_match(prediction, targets) is bool(cover)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("\u201cRome\u201d", "rome"),
        ("Beyonc\u00e9", "beyonce"),
        ("Beyonce\u0301", "beyonce"),  # the same in two code points
        ("\u0130stanbul", "istanbul"),
        ("Stra\u00dfe", "strasse"),
        ("\uff32\uff4f\uff4d\uff45", "rome"),  # full width
        ("\U0001d411ome", "rome"),  # a mathematical capital, which has no lower case of its own
        ("\ufb01n\u2019s", "fins"),  # a ligature and a typographic apostrophe
        ("The \u2014 Who\u2026", "who"),
        ("\u5317\u4eac\u3002", "\u5317\u4eac"),
        ("\u304c", "\u304c"),  # the marks of kana are no accents
        ("\u0926\u093f\u0932\u094d\u0932\u0940", "\u0926\u093f\u0932\u094d\u0932\u0940"),  # nor those of Devanagari
        ("\u00d8re", "\u00f8re"),
        ("$5 \u20ac5", "5 \u20ac5"),  # ASCII symbols go as everywhere, other symbols stay
        ("\u2014", ""),
    ],
)
def test_unicode_normalisation(text, normalized):
    assert normalize_answer(text, unicode=True) == normalize_unicode(text) == normalized


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("Jean-Luc", "jean luc"),
        ("snake_case", "snake case"),
        ("U.S.", "u s"),
        ("the a-team", "team"),  # the hyphen leaves an article
        ("True", "yes"),
        ("false.", "no"),
        ("true story", "true story"),
    ],
)
def test_normalisation_of_r1_searcher(text, normalized):
    assert normalize_r1_searcher(text) == normalized


@pytest.mark.parametrize(
    ("prediction", "target", "text", "tokens", "bag"),
    [
        ("party", "art", 1, 0, 0),
        ("a smart move", "art", 1, 0, 0),
        ("new article", "art", 1, 0, 0),
        ("the art of war", "art of war", 1, 1, 1),
        ("war and art", "art war", 0, 0, 1),
        ("art at war", "art war", 0, 0, 1),
        ("New York", "New York City", 0, 0, 0),
        ("Rome", "The", 0, 0, 0),
        ("the", "The", 1, 1, 1),
    ],
)
def test_three_ways_to_cover(prediction, target, text, tokens, bag):
    found = [cover(prediction, [target]) for cover in (cover_match, cover_tokens, cover_bag)]
    assert found == [bool(text), bool(tokens), bool(bag)]


def test_metrics_take_another_normalisation():
    assert exact_match("Beyonc\u00e9", ["beyonce"], normalize_unicode)
    assert cover_match("by Beyonc\u00e9 Knowles", ["beyonce"], normalize_unicode)
    assert token_f1("Beyonc\u00e9 Knowles", ["beyonce"], normalize_unicode) == pytest.approx(2 / 3)
    assert token_f1("True", ["yes"], normalize_r1_searcher) == 1.0


def test_a_gold_answer_in_texts():
    assert contains_gold(["x", "in the U.S."], ["Oslo", "US"])
    assert not contains_gold(["U", "S"], ["US"])  # not across two texts
    assert not contains_gold(["The A team"], ["A", "the", ""])
    assert contains_gold(["Beyonc\u00e9"], ["beyonce"], normalize_unicode)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("one two", 2),
        ("don't", 2),
        ("x=1, y_2", 3),
        ("\u5317\u4eac is \u6771", 4),
        ("\u00c9mile E\u0301mile \u2014", 2),
        ("नई दिल्ली", 2),
        ("เมืองหลวง is", 4),  # nine characters
        ("서울에 가다", 2),
    ],
)
def test_words(text, words):
    assert count_words(text) == words


def test_cjk():
    assert has_cjk("a \u5317") and has_cjk("\u304b") and not has_cjk("Z\u00fcrich \u0420\u0438\u043c")


PLAIN = ["a", "the", "An", "yes", "no", "noanswer", "Rome", "rome,", "New", "York"]
WORDS = st.sampled_from([*PLAIN, "U.S.", "-", "1,000", "\u00e9", "x-y", "?"])
PHRASES = st.lists(WORDS, max_size=6).map(" ".join)
TEXTS = st.one_of(PHRASES, st.text(max_size=20))
GOLDS = st.lists(TEXTS, min_size=1, max_size=4)


def their_metrics(prediction: str, targets: list[str]) -> tuple[float, float]:
    """(exact match, F1) of torchmetrics, in [0, 1]."""
    answers = {"answer_start": [0] * len(targets), "text": targets}
    found = squad([{"prediction_text": prediction, "id": "0"}], [{"answers": answers, "id": "0"}])
    return float(found["exact_match"]) / 100, float(found["f1"]) / 100


def check_agreement(prediction: str, targets: list[str]) -> None:
    """Ours differ on purpose in two rules, and only there: empty golds, and yes and no as a whole."""
    if not all(map(normalize_answer, targets)):
        return
    exact, f1 = their_metrics(prediction, targets)
    assert exact_match(prediction, targets) == exact
    if {"yes", "no", "noanswer"}.isdisjoint(map(normalize_answer, [prediction, *targets])):
        assert token_f1(prediction, targets) == pytest.approx(f1, abs=1e-6)
    else:
        assert token_f1(prediction, targets) <= f1 + 1e-6


@pytest.mark.parametrize(("prediction", "targets"), [case[:2] for case in HARD])
def test_agreement_with_torchmetrics_on_the_hard_cases(prediction, targets):
    if targets:
        check_agreement(prediction, targets)


@given(TEXTS, GOLDS)
def test_agreement_with_torchmetrics(prediction, targets):
    check_agreement(prediction, targets)


@given(PHRASES, st.lists(st.sampled_from(["Rome", "New York", "the U.S.", "1,000 x-y"]), min_size=1, max_size=4))
def test_agreement_with_torchmetrics_where_most_words_are_shared(prediction, targets):
    check_agreement(prediction, targets)


def test_where_torchmetrics_differs():
    assert their_metrics("", ["A"]) == (1.0, 1.0)  # nothing equals nothing
    assert not exact_match("", ["A"])
    assert their_metrics("yes it is", ["yes"])[1] == pytest.approx(0.5)
    assert token_f1("yes it is", ["yes"]) == 0.0


@pytest.mark.parametrize("normalize", [normalize_answer, normalize_unicode, normalize_r1_searcher])
@given(text=TEXTS, targets=GOLDS)
def test_laws(normalize, text, targets):
    normalized = normalize(text)
    assert normalize(normalized) == normalized
    exact, f1 = exact_match(text, targets, normalize), token_f1(text, targets, normalize)
    text_cover, tokens, bag = (cover(text, targets, normalize) for cover in (cover_match, cover_tokens, cover_bag))
    assert 0.0 <= f1 <= 1.0
    assert not exact or (f1 == 1.0 and tokens)
    assert not tokens or (text_cover and bag)
    assert exact_match(text, [text], normalize) is bool(text.strip())
    assert exact_match("", targets, normalize) is cover_match("", targets, normalize) is False
