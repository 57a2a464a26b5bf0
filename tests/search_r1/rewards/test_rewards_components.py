"""Components by themselves, on real episodes: what each reads, its options, and its values by hand."""

from __future__ import annotations

import pytest
from chat_episodes import chat_trajectory, says, search
from format_models import tokenizer_of
from reward_episodes import reading_of

from search_r1.llm_agent.grammar import Grammar
from search_r1.rewards.component import make_component
from search_r1.rewards.composite import CompositeReward
from search_r1.rewards.presets.research import RESEARCH
from search_r1.rewards.reading import read_trajectory
from verl.errors import ConfigError

SEARCH = "<think>a</think><search> Who? </search>"
ANSWER = "<think>b</think><answer> Rome </answer>"


def measure(tokenizer, name, lines, options=None, **rest) -> float:
    return make_component(name, options)(reading_of(tokenizer, lines, **rest))


@pytest.mark.parametrize(
    ("name", "options", "answer", "targets", "value"),
    [
        ("exact_match", {}, "Beyonc\u00e9", ["Beyonce"], 0),
        ("exact_match", {"unicode": True}, "Beyonc\u00e9", ["Beyonce"], 1),
        ("f1", {}, "New York City", ["New York", "x"], 0.8),
        ("f1", {}, "Beyonc\u00e9", ["Beyonce"], 0),
        ("f1", {"unicode": True}, "Beyonc\u00e9 Knowles", ["Beyonce"], 2 / 3),
        ("cover_match", {}, "a party", ["art"], 1),
        ("cover_match", {"by": "tokens"}, "a party", ["art"], 0),
        ("cover_match", {"by": "tokens"}, "york new york", ["new york"], 1),
        ("cover_match", {"by": "tokens"}, "york new", ["new york"], 0),
        ("cover_match", {"by": "bag"}, "york new", ["new york"], 1),
        ("cover_match", {"unicode": True}, "by Beyonc\u00e9", ["Beyonce"], 1),
        ("r1_searcher_f1", {}, "Jean-Luc Godard", ["Jean Luc"], 0.8),
        ("r1_searcher_cover", {}, "by Jean-Luc", ["Jean Luc"], 1),
    ],
)
def test_answers(byte_tokenizer, name, options, answer, targets, value):
    lines = [f"<think>a</think><answer>{answer}</answer>"]
    assert measure(byte_tokenizer, name, lines, options, targets=targets) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("name", ["exact_match", "f1", "cover_match", "r1_searcher_f1", "r1_searcher_cover"])
def test_without_an_answer_there_is_nothing_to_match(byte_tokenizer, name):
    assert measure(byte_tokenizer, name, ["<think>Rome</think> Rome"]) == 0.0
    assert measure(byte_tokenizer, name, ["<answer>Rome</answer>"]) == 1.0


@pytest.mark.parametrize(("unicode", "found"), [(False, 0.0), (True, 1.0)])
def test_retrieval_with_unicode(byte_tokenizer, unicode, found):
    rest = {"targets": ["Beyonce"], "page": '"Singer"\nBeyonc\u00e9 sings.'}
    assert measure(byte_tokenizer, "retrieval_correct", [SEARCH, ANSWER], {"unicode": unicode}, **rest) == found


@pytest.mark.parametrize(
    ("lines", "free", "cost"),
    [
        ([ANSWER], 0, 0),
        ([SEARCH, ANSWER], 0, 1),
        ([SEARCH, SEARCH, SEARCH, ANSWER], 0, 3),
        ([SEARCH, SEARCH, SEARCH, ANSWER], 2, 1),
        ([SEARCH, ANSWER], 2, 0),
        ([SEARCH, "hm", ANSWER], 0, 1),  # feedback is no search
        ([SEARCH, SEARCH], 0, 1),  # the last one is not made
    ],
)
def test_search_cost(byte_tokenizer, lines, free, cost):
    assert measure(byte_tokenizer, "search_cost", lines, {"free": free}) == cost


@pytest.mark.parametrize(
    ("queries", "repeated"),
    [
        ([], 0),
        (["x"], 0),
        (["capital of Italy", "the capital of Italy?"], 1),
        (["Z\u00fcrich", "zurich", "Zurich!"], 2),
        (["x y", "y x"], 0),
        (["x", "y", "x", "y", "z"], 2),
        (["?", "!"], 0),  # both normalise to nothing
        (["?", "?"], 1),
    ],
)
def test_repeated_query(byte_tokenizer, queries, repeated):
    lines = [*(f"<think>a</think><search>{query}</search>" for query in queries), ANSWER]
    assert measure(byte_tokenizer, "repeated_query", lines) == repeated


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        # the budget is 4 words
        (["<think>one two three four</think><answer>five six seven</answer>"], 0),
        (["<think>one two three four five</think><answer>x</answer>"], 0.25),
        (["<think>1 2</think><search>a b c d</search>", "<think>3 4 5 6</think><answer>x</answer>"], 0.5),
        (["1 2 3 4 5 6 <answer>x</answer>"], 0.5),  # thinking aloud
        (["<think>1 2 3 4 5 6 <answer>x</answer>"], 0.5),  # the tag left open
        (["<think>" + "x " * 50 + "</think><answer>x</answer>"], 1),
        (["<think>\u5317\u4eac\u5317\u4eac\u5317\u4eac</think><answer>x</answer>"], 0.5),
        (["<answer>x</answer>"], 0),
    ],
)
def test_long_think(byte_tokenizer, lines, value):
    assert measure(byte_tokenizer, "long_think", lines, {"budget": 4}) == value


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (says("1 2 3 4 5"), 3),
        (says("1 2 3 4 5", thought="6 7"), 5),
        (says("1 2 <answer> 3 4 </answer> 5"), 6),  # an answer in tags, and words around it
    ],
)
def test_reasoning_and_searches_of_a_chat_model(end, words):
    """Searches are counted one by one, though a turn and a call may have several. Neither calls nor what is said as the
    answer is reasoning: of the first two turns, three words are.
    """
    both = search(queries=["river", "city"])
    turns = [says("I look.", search(query="river"), search(query="city")), says("", both, thought="Again."), end]
    reading = read_trajectory(chat_trajectory("xml", turns), tokenizer_of("xml"))
    assert reading.queries == ("river", "city", "river", "city")
    values = {name: make_component(name, {})(reading) for name in ("search_cost", "repeated_query")}
    assert values == {"search_cost": 4, "repeated_query": 2}
    assert make_component("long_think", {"budget": 4})(reading) == max(0, min(1, words / 4 - 1))


BOX = r"<think>b</think><answer>It is \boxed{Rome}.</answer>"


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ([BOX], 1),
        ([SEARCH, BOX], 1),
        ([SEARCH, SEARCH, BOX], 1),
        (["<think>a <search> q </search>", r"b</think><answer>\boxed{Rome}</answer>"], 1),  # one thought over all turns
        ([r"<answer>\boxed{Rome}</answer>"], 0),  # no thought
        ([r"<think>a<answer>\boxed{Rome}</answer>"], 0),  # left open
        ([r"a</think></think><think><answer>\boxed{Rome}</answer>"], 0),
        ([ANSWER], 0),  # no box
        ([r"<think>\boxed{Rome}</think><answer>Rome</answer>"], 0),  # outside of the answer
        ([r"<think>b</think><answer>\boxed{Rome</answer>"], 0),  # not closed
        ([BOX + r"<answer>\boxed{Rome}</answer>"], 0),  # two answers
        ([BOX + "</answer>"], 0),
        ([SEARCH, SEARCH], 0),  # ended by the limit of turns
        ([SEARCH, "<think>b</think>"], 0),
        ([r"<think>a</think><search><answer>\boxed{Rome}</answer></search>", "<think>b</think>"], 0),  # in a query
        (["hm", BOX], 0),  # told that this was no action
        (["<search>q</search><search>r</search>", BOX], 0),  # one of two is made
        (["<search><search>q</search>", BOX], 0),
        (["<think>a</think><search>q</search><result>Rome</result>" + BOX], 0),  # its own results, a real search
        (["<think>a</think><result>Rome</result>" + BOX], 0),  # its own results
        ([SEARCH, BOX.replace("b<", "b <search>q <")], 0),  # a search that is not followed by anything
    ],
)
def test_research_format(byte_tokenizer, lines, kept):
    assert measure(byte_tokenizer, "research_format", lines, grammar=RESEARCH) == kept


def test_research_format_of_a_grammar_without_a_box(byte_tokenizer):
    assert measure(byte_tokenizer, "research_format", [SEARCH, ANSWER]) == 1.0


@pytest.mark.parametrize(
    ("lines", "violation"),
    [
        ([ANSWER], 0),
        ([SEARCH, ANSWER], 0),
        (["<think>a <search>q</search>", "b</think><answer>Rome</answer>"], 0),  # one thought over all turns
        (["<answer>Rome</answer>"], 1),
        (["<think>a<answer>Rome</answer>"], 1),
        (["<think><think>a</think><answer>Rome</answer>"], 1),
        (["a</think><answer>Rome</answer>"], 1),
        (["<think>a</think><think>b</think><answer>Rome</answer>"], 1),
        (["<think>a</think><search>q</search>", "<answer>Rome</answer>"], 1),  # answers without a thought
        (["<think>a</think><think>a</think><search>q</search>", ANSWER], 1),
        (["<think>a <search> b</think><answer>Rome</answer>"], 1),
        ([ANSWER + "<answer>Rome</answer>"], 1),
        (["<think>a</think>"], 1),
        (["<think>a</think><answer>1 2 3 4 5 6 7 8 9 10</answer>"], 0),
        (["<think>a</think><answer>1 2 3 4 5 6 7 8 9 10 11</answer>"], 1),
        (["<think>\u5317</think><answer>Rome</answer>"], 1),
        (["<think>Assistant: a</think><answer>Rome</answer>"], 1),
        (["<think>an assistant</think><answer>Rome</answer>"], 0),
        (["<think>a</think><information>x</information><answer>Rome</answer>"], 1),
    ],
)
def test_violation_of_r1_searcher(byte_tokenizer, lines, violation):
    assert measure(byte_tokenizer, "r1_searcher_violation", lines) == violation


def test_no_violation_by_the_words_of_others(byte_tokenizer):
    page = '"Assistant"\n\u5317\u4eac </think> <answer> x </answer>'
    assert measure(byte_tokenizer, "r1_searcher_violation", [SEARCH, ANSWER], page=page) == 0.0
    chinese = ["<think>\u5317</think><answer>\u5317\u4eac</answer>"]
    assert measure(byte_tokenizer, "r1_searcher_violation", chinese, question="\u5317\u4eac\u5728\u54ea") == 0.0


@pytest.mark.parametrize(
    ("lines", "search", "answer"),
    [
        ([ANSWER], 0, 1),
        ([SEARCH, ANSWER], 1, 1),
        ([SEARCH, "<answer>Rome</answer>"], 1, 0),
        (["<search>q</search><search>r</search>", ANSWER], 0, 1),
        (["<search>q</search><information>x</information>", ANSWER], 0, 1),
        ([SEARCH, SEARCH], 0, 0),  # the last one finds nothing
    ],
)
def test_the_halves_of_r1_searchers_first_stage(byte_tokenizer, lines, search, answer):
    assert measure(byte_tokenizer, "r1_searcher_search_format", lines) == search
    assert measure(byte_tokenizer, "r1_searcher_answer_format", lines) == answer


NOTE = "<refine>Rome</refine>"


@pytest.mark.parametrize(
    ("lines", "correct", "form"),
    [
        ([SEARCH, NOTE + ANSWER], 1, 1),
        ([SEARCH, "<refine>it is in Italy</refine>" + ANSWER], 0, 1),
        ([NOTE + ANSWER], 1, 0),  # no search
        ([SEARCH, ANSWER], 0, 0),
        ([SEARCH, "<refine>Rome" + ANSWER], 0, 0),
        ([SEARCH, NOTE + SEARCH, "<refine>Paris</refine>" + ANSWER], 1, 1),
    ],
)
def test_refine(byte_tokenizer, lines, correct, form):
    assert measure(byte_tokenizer, "refine_correct", lines) == correct
    assert measure(byte_tokenizer, "refine_format", lines) == form


def test_a_page_cannot_write_the_policys_notes(byte_tokenizer):
    lines = [SEARCH, "<refine>nothing</refine>" + ANSWER]
    assert measure(byte_tokenizer, "refine_correct", lines, page='"x"\n<refine>Rome</refine>') == 0.0


def test_a_grammar_without_search(byte_tokenizer):
    grammar = Grammar(search=None)
    assert measure(byte_tokenizer, "search_cost", [ANSWER], grammar=grammar) == 0.0
    assert measure(byte_tokenizer, "research_format", [ANSWER], grammar=grammar) == 1.0
    assert measure(byte_tokenizer, "r1_searcher_violation", [ANSWER], grammar=grammar) == 0.0
    assert measure(byte_tokenizer, "refine_format", [NOTE + ANSWER], grammar=grammar) == 0.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cover_match", {"by": "letters"}, "by is 'letters'"),
        ("search_cost", {"free": -1}, "free is -1"),
        ("long_think", {"budget": 0}, "budget is 0"),
        ("f1", {"utf8": True}, "reward component f1: .*utf8"),
        ("has_answer", {"unicode": True}, "reward component has_answer"),
    ],
)
def test_options_that_cannot_be_used(name, options, message):
    with pytest.raises(ConfigError, match=message):
        CompositeReward({name: 1}, {name: options})
