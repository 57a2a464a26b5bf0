"""How much of the passages the policy reads: nearly all of the limit, in rank order, with whole tags."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from search_r1.data.tinywiki.policy import train_tokenizer
from search_r1.llm_agent.grammar import SEARCH_R1
from search_r1.llm_agent.observations import Observation, ObservationWriter, format_passage
from verl.agent.text import encode_text

EMPTY = "\n\n<information></information>\n\n"
WORDS = [f"{start}{end}" for start in ("river", "sea", "hill", "city") for end in ("side", "stone", "wall", "")]
LETTERS = st.one_of(
    st.text(st.sampled_from("ab \n"), max_size=80),
    st.text(st.sampled_from("<>/ answer"), max_size=80),
    st.text(st.sampled_from("\u5317\u4eac\u00e9\U0001f600 "), max_size=60),
    st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join),
)
DOCUMENTS = st.lists(st.builds(lambda title, text: {"contents": f'"{title}"\n{text}'}, LETTERS, LETTERS), max_size=4)


@pytest.fixture(scope="module", params=["bytes", "words"])
def tokenizer(request: pytest.FixtureRequest, byte_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """One whose tokens are mostly letters, and one that has learned words and tags."""
    if request.param == "bytes":
        return byte_tokenizer
    return train_tokenizer([f"<information>Doc 1(Title: {word}) {' '.join(WORDS)}.</information>" for word in WORDS])


def document(tokenizer: PreTrainedTokenizerFast, number: int, size: int) -> dict[str, str]:
    """A document that is `size` tokens long in its place among the others."""
    contents = f'"Title {number}"\n'
    for more in (f" {' '.join(WORDS)}", *(f" {word}" for word in WORDS), "a"):
        while len(encode_text(tokenizer, format_passage(number, contents + more))) <= size:
            contents += more
    return {"contents": contents}


def body(observation: Observation) -> str:
    assert observation.text.startswith("\n\n<information>") and observation.text.endswith("</information>\n\n")
    return SEARCH_R1.unwrap_information(observation.text)


def everything(documents: list[dict[str, str]]) -> str:
    return "".join(format_passage(number, each["contents"]) for number, each in enumerate(documents, start=1))


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [((100, 100, 600), 3), ((100, 600, 100), 2), ((600, 100, 100), 1), ((100, 100, 100), 3), ((300, 600, 600), 2)],
)
def test_nearly_all_of_the_limit_is_used(tokenizer, sizes: tuple[int, ...], shown: int) -> None:
    documents = [document(tokenizer, number, size) for number, size in enumerate(sizes, start=1)]
    observation = ObservationWriter(tokenizer, 500).write(documents)
    assert observation.num_documents == shown
    assert everything(documents).startswith(body(observation))
    if sum(sizes) < 450:
        assert body(observation) == everything(documents).strip()
    else:
        assert 480 <= len(observation.ids) <= 500
    for number, size in enumerate(sizes[: shown - 1], start=1):  # the ones before the cut are whole
        assert size and documents[number - 1]["contents"].split("\n")[1].strip() in body(observation)


def test_a_document_of_which_only_the_title_would_fit_is_left_out(tokenizer) -> None:
    documents = [{"contents": '"One"\nriver'}, {"contents": '"Two"\nsea'}]
    for limit in range(len(encode_text(tokenizer, EMPTY)), 120):
        observation = ObservationWriter(tokenizer, limit).write(documents)
        assert ("Doc 2" in observation.text) == (observation.num_documents == 2)
        if "Doc 2" in observation.text:
            assert 'Doc 2(Title: "Two") s' in observation.text


def test_a_text_without_spaces_is_cut_too(tokenizer) -> None:
    """Going back to the end of a word must not lose a passage in Chinese."""
    documents = [document(tokenizer, 1, 250), {"contents": '"\u5317"\n' + "\u5317\u4eac" * 400}]
    observation = ObservationWriter(tokenizer, 400).write(documents)
    assert observation.num_documents == 2 and len(observation.ids) >= 390
    assert "\ufffd" not in tokenizer.decode(observation.ids)


@settings(max_examples=4 * settings.default.max_examples)
@given(documents=DOCUMENTS, limits=st.tuples(st.integers(0, 250), st.integers(0, 250)))
def test_what_is_shown_is_the_start_of_all_and_grows_with_the_limit(tokenizer, documents, limits) -> None:
    least = len(encode_text(tokenizer, EMPTY))
    small, large = (ObservationWriter(tokenizer, least + limit).write(documents) for limit in sorted(limits))
    for observation, limit in ((small, min(limits)), (large, max(limits))):
        assert len(observation.ids) <= least + limit
        assert observation.ids == encode_text(tokenizer, observation.text)
        assert tokenizer.decode(observation.ids) == observation.text and "\ufffd" not in observation.text
        assert (everything(documents) or "No results found.").startswith(body(observation))
    assert body(large).startswith(body(small))
    assert large.num_documents >= small.num_documents


@settings(max_examples=2 * settings.default.max_examples)
@given(
    texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=60), min_size=1, max_size=4), data=st.data()
)
def test_a_word_more_would_be_too_long(tokenizer, texts, data) -> None:
    documents = [{"contents": f'"T"\n{" ".join(words)}'} for words in texts]
    whole = everything(documents).strip()
    whole_ids = encode_text(tokenizer, SEARCH_R1.wrap_information(whole))
    limit = data.draw(st.integers(60, max(60, len(whole_ids))))
    shown = body(ObservationWriter(tokenizer, limit).write(documents))
    if shown == whole:
        return
    rest = whole[len(shown) :].lstrip()
    title = 'Doc 1(Title: "T") '
    words = len(title) if rest.startswith("Doc") else 0  # a title goes with the first word after it
    more = whole[: whole.index(rest, len(shown)) + words + max(map(len, WORDS))]
    assert len(encode_text(tokenizer, SEARCH_R1.wrap_information(more))) > limit


def test_a_page_of_megabytes_is_not_tokenized_whole(tokenizer) -> None:
    """An online engine's page is as long as it likes; the event loop does not wait for all of it."""
    seen: list[int] = []

    class Counting:
        def __call__(self, text: str, **options: object) -> object:
            seen.append(len(text))
            return tokenizer(text, **options)

        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

    page = {"contents": '"T"\n' + " ".join(WORDS) * 20_000}
    observation = ObservationWriter(Counting(), 500).write([page, page])  # type: ignore[arg-type]
    assert 480 <= len(observation.ids) <= 500
    assert sum(seen) < 100_000
