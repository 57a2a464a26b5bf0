"""The text of a turn while it is sampled, and what follows one that the policy itself ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from chat_tokenizer import QWEN_TEMPLATE, chat_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from search_r1.llm_agent.transcript import Reply, read_turns
from verl.agent.environment import Generation, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.messages import encode_prompt
from verl.agent.text import TurnDecoder, decode_turn, encode_text
from verl.protocol import Prompt, Source, Status, Trajectory

LIMITS = EpisodeLimits(max_turns=3, max_response_length=128, max_context_length=2000)
ASKED = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
FED_BACK = "<|im_start|>user\nThat was no action.<|im_end|>\n<|im_start|>assistant\n"
PASSAGES = "\n\n<information>Doc 1(Title: Osk) Osk is a town.</information>\n\n"
ANSWER = "<answer> Osk </answer>"


class Library:
    def search(self, query: str) -> list[dict[str, str]]:
        return [{"title": "Osk", "text": "Osk is a town."}]


class Script:
    """A policy that writes its lines; it keeps what it was shown."""

    def __init__(self, tokenizer, lines: Sequence[str]) -> None:
        self.turns = [encode_text(tokenizer, line) for line in lines]
        self.contexts: list[list[int]] = []

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        turn = self.turns[len(self.contexts)]
        self.contexts.append(list(ids))
        cut = turn[: sampling.max_tokens]
        return Generation(cut, (-1.0,) * len(cut), "stop" if len(cut) == len(turn) else "length")


def play(tokenizer, *lines: str, limits: EpisodeLimits = LIMITS) -> tuple[Trajectory, str]:
    """The trajectory, and the text of all its ids. Each context is the start of the sequence that is trained."""
    environment = SearchEnvironment(Searcher(Library(), 1), tokenizer, 400, "That was no action.")
    policy = Script(tokenizer, lines)
    prompt = Prompt(tuple(encode_prompt(tokenizer, [{"role": "user", "content": "Who?"}])), "t", {})
    trajectory = asyncio.run(run_episode(prompt, "g", policy, environment, tokenizer, Sampling(), limits, 0))
    for context in policy.contexts:
        assert trajectory.ids[: len(context)] == context
    sampled = [segment.ids for segment in trajectory.segments if segment.source is Source.POLICY]
    assert sampled == policy.turns[: len(sampled)], "what was sampled is what is trained, EOS included"
    return trajectory, tokenizer.decode(trajectory.ids)


def test_feedback_after_eos_is_a_message_of_the_user():
    tokenizer = chat_tokenizer()
    trajectory, text = play(tokenizer, "Hm.<|im_end|>", ANSWER)
    assert text == f"{ASKED}Hm.<|im_end|>\n{FED_BACK}{ANSWER}"
    chat = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "That was no action."},
    ]
    begun = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == begun + ANSWER, "the model's own layout"
    assert trajectory.ids[: -len(trajectory.segments[-1].ids)] == list(encode_text(tokenizer, begun))
    assert trajectory.status is Status.ANSWERED
    [hm, _] = read_turns(trajectory, tokenizer)
    assert (hm.text, hm.reply, hm.observation) == ("Hm.", Reply.FEEDBACK, "That was no action.")


def test_a_search_goes_on_in_its_own_turn():
    _, text = play(chat_tokenizer(), "<search> Osk </search>", "No.<|im_end|>", "<search> Osk </search>\n", ANSWER)
    first = f"{ASKED}<search> Osk </search>{PASSAGES}No.<|im_end|>\n{FED_BACK}"
    assert text == f"{first}<search> Osk </search>\n{PASSAGES}{ANSWER}"


def test_a_turn_cut_at_its_length_goes_on_too():
    short = EpisodeLimits(max_turns=1, max_response_length=3, max_context_length=2000)
    tokenizer = chat_tokenizer()
    environment = SearchEnvironment(None, tokenizer, 400, "That was no action.")
    prompt = Prompt(tuple(encode_prompt(tokenizer, [{"role": "user", "content": "Who?"}])), "t", {})
    policy = Script(tokenizer, ["Hmmmmm", "Hmmmmm"])
    trajectory = asyncio.run(run_episode(prompt, "g", policy, environment, tokenizer, Sampling(), short, 0))
    assert tokenizer.decode(trajectory.ids) == f"{ASKED}Hmm\nThat was no action.\nHmm"


def test_a_base_model_whose_eos_is_not_the_end_of_a_turn():
    """Its prompts are chats as well, so its turn is closed for it."""
    tokenizer = chat_tokenizer(eos="<|endoftext|>")
    _, text = play(tokenizer, "Hm.<|endoftext|>", ANSWER)
    assert text == f"{ASKED}Hm.<|endoftext|><|im_end|>\n{FED_BACK}{ANSWER}"


def test_without_a_chat_template_feedback_follows_eos():
    tokenizer = chat_tokenizer(eos="<|endoftext|>", template=None)
    trajectory, text = play(tokenizer, "Hm.<|endoftext|>", ANSWER)
    assert text == f"Who?Hm.<|endoftext|>\nThat was no action.\n{ANSWER}"
    assert read_turns(trajectory, tokenizer)[0].observation == "\nThat was no action.\n"


@pytest.mark.parametrize(
    "template",
    [
        QWEN_TEMPLATE.replace("{% for", "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}{% for"),
        "{{ messages[0]['content'] }}",
    ],
)
def test_a_template_without_a_second_user_message_is_told(template: str, caplog: pytest.LogCaptureFixture):
    tokenizer = chat_tokenizer(template=template)
    for _ in range(2):
        _, text = play(tokenizer, "Hm.<|im_end|>", ANSWER)
        assert text.endswith(f"Hm.<|im_end|>\nThat was no action.\n{ANSWER}")
    assert [record.message for record in caplog.records if "second user message" in record.message] == [
        next(record.message for record in caplog.records)
    ]


def test_a_reply_that_does_not_fit_with_its_headers_ends_the_episode():
    tokenizer = chat_tokenizer()
    _, text = play(tokenizer, "Hm.<|im_end|>", ANSWER)
    room = len(encode_text(tokenizer, text.removesuffix(ANSWER)))
    for length, status in ((room, Status.ANSWERED), (room - 1, Status.LENGTH_LIMIT)):
        limits = EpisodeLimits(max_turns=3, max_response_length=128, max_context_length=length)
        assert play(tokenizer, "Hm.<|im_end|>", ANSWER, limits=limits)[0].status is status


SIZE = 300  # entries of byte_tokenizer


def texts_of(tokenizer: PreTrainedTokenizerFast, pieces: list[list[int]]) -> list[str]:
    decoder = TurnDecoder(tokenizer)
    return [*map(decoder.feed, pieces), decoder.end()]


@given(pieces=st.lists(st.lists(st.integers(0, SIZE - 1), max_size=6), max_size=40))
def test_any_ids_in_any_pieces_give_the_text_of_the_turn(byte_tokenizer, pieces) -> None:
    """Also bytes that are no character, and end-of-sequence tokens in the middle."""
    ids = [token for piece in pieces for token in piece]
    assert "".join(texts_of(byte_tokenizer, pieces)) == decode_turn(byte_tokenizer, ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40))
def test_no_character_is_split(byte_tokenizer, text) -> None:
    texts = texts_of(byte_tokenizer, [[token] for token in encode_text(byte_tokenizer, text)])
    assert "".join(texts) == text
    assert not any("\ufffd" in part for part in texts)


def test_a_text_comes_with_the_token_that_completes_it(byte_tokenizer) -> None:
    ids = encode_text(byte_tokenizer, "a\u6cb3b")
    assert len(ids) == 5  # the character is three tokens
    assert texts_of(byte_tokenizer, [[token] for token in ids]) == ["a", "", "", "\u6cb3", "b", ""]


def test_a_turn_that_ends_inside_a_character(byte_tokenizer) -> None:
    ids = encode_text(byte_tokenizer, "a\u6cb3")[:-1]
    assert texts_of(byte_tokenizer, [list(ids)]) == ["", "a\ufffd"]


@pytest.fixture(scope="module")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words with their space in front, as in SentencePiece: the first word of a text is decoded without it."""
    words = ["<unk>", "\u2581the", "\u2581river", "s", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


def test_spaces_between_words_stay(word_tokenizer) -> None:
    assert decode_turn(word_tokenizer, [1, 2, 3, 1, 4]) == "the rivers the"
    assert texts_of(word_tokenizer, [[1], [2], [3], [1], [4]]) == ["the", " river", "s", " the", "", ""]
