"""Writes everything a TinyWiki run needs into one folder: corpus, prompts, warm-start trajectories, and the initial
policy, a byte-level tokenizer and a small Qwen2 made from scratch, which stands in for a base language model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from long_task import track
from search_r1.data.chat_template import CHAT_TEMPLATE
from search_r1.data.tinywiki.chat import CALL_TAGS, TURN_END, TURN_START, ChatDemonstrator
from search_r1.data.tinywiki.chat import PAD as CHAT_PAD
from search_r1.data.tinywiki.chat import TEMPLATE as CHAT
from search_r1.data.tinywiki.demonstrator import Demonstrator, Habits, PassageIndex, Segment
from search_r1.data.tinywiki.marathon import Lapses, MarathonDemonstrator
from search_r1.data.tinywiki.questions import (
    MARATHON,
    TOOL_KINDS,
    ChainQuestion,
    Question,
    distinct_questions,
    load_template,
    make_question,
    prompt_row,
)
from search_r1.data.tinywiki.world import World, hash_number, plan_worlds, stream_passages
from search_r1.llm_agent.templates import Template
from verl.errors import DataError
from verl.process.startup import phase
from verl.process.storage import share

logger = logging.getLogger(__name__)

TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
EOS = "<|endoftext|>"
PAD = "<|pad|>"

# The width of a head, hidden_size / num_attention_heads, must be a multiple of 32 for the sampler's attention kernels.
SHAPE = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 8192}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
# The usual base of 10,000 is made for thousands of tokens. To copy a name the policy has to look at the token before
# another, which it learns much sooner when more of the rotations are fast (docs/results.md).
POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 1024,
    *,
    tags: tuple[str, ...] = TAGS,
    specials: tuple[str, ...] = (EOS, PAD),
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text round-trips, each tag is one ordinary (not special) id.

    The first of the special tokens is EOS, the second is for padding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # tags are cut out before the merges apply, so the merges are learned on what stands between them
    between_tags = re.compile("|".join(map(re.escape, (*tags, *specials))))
    tokenizer.train_from_iterator((part for text in texts for part in between_tags.split(text)), trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[0], pad_token=specials[1], clean_up_tokenization_spaces=False
    )


def train_chat_tokenizer(texts: Iterable[str] = (), vocab_size: int = 1280) -> PreTrainedTokenizerFast:
    """Train a tokenizer as `train_tokenizer` does, with the tokens of ChatML, those of Hermes calls, and a template.

    Without texts its vocabulary is the bytes, which is enough to write conversations as text.
    """
    specials = (TURN_END, CHAT_PAD, TURN_START)
    tokenizer = train_tokenizer(texts, vocab_size, tags=CALL_TAGS, specials=specials)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return a float32 model with random weights for the tokenizer's vocabulary, head tied to the embedding."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **SHAPE,
        **HEADS,
        **POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # The seed holds for the weights alone: afterwards the caller's random state is as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).to(torch.float32)


SERVED = {"train": 50, "validation": 15, "test": 35}
"""World -> percent of the served passages. The warm start's world is not served."""

SFT_SHARES: dict[int | str, int] = {"comparison": 3, "page": 3, "arithmetic": 3, "unanswerable": 2}
"""How much more often than a question of one hop the warm start has a kind: what it has to learn there is rare."""

DOCUMENT_SHARE = 0.1
"""Share of the warm start's "lm" rows that are a bare passage."""

SFT_SCHEMA = pa.schema(
    [
        ("segments", pa.list_(pa.struct([("source", pa.string()), ("text", pa.string())]))),
        ("phase", pa.string()),
    ]
)


@dataclass(frozen=True)
class Recipe:
    """The contents of a TinyWiki folder: how large it is, and how hard.

    Attributes:
        seed: seed of worlds, questions, trajectories and initial weights.
        num_passages: passages (articles in the chat mode) of the train, validation and test worlds together.
        num_sft_passages: those of the world the demonstrator lives in.
        num_lm_rows: warm-start rows with the loss on all tokens.
        num_policy_rows: warm-start rows with the loss on the policy's tokens.
        num_train, num_validation, num_test: prompts per split.
        train_hops: hop counts of the training prompts, in turn (longer questions are drawn more often).
        test_hops: hop counts of the validation and test prompts, in turn.
        habits: how the demonstrator errs.
        chat: whether the policy is a chat model that calls tools; otherwise it writes tags. The worlds then consist of
            articles of two passages.
        kinds: kinds of questions, of `TOOL_KINDS`, that follow those of `train_hops` and `test_hops` in turn; only for
            the chat mode.
        lapses: how the demonstrator of marathons errs, which sums up; None: it is none.
    """

    seed: int = 0
    num_passages: int = 2000
    num_sft_passages: int = 12000
    num_lm_rows: int = 12800
    num_policy_rows: int = 19200
    num_train: int = 1200
    num_validation: int = 100
    num_test: int = 500
    train_hops: tuple[int, ...] = (1, 2, 1, 2, 2)
    test_hops: tuple[int, ...] = (1, 2)
    habits: Habits = Habits()
    chat: bool = False
    kinds: tuple[str, ...] = ()
    lapses: Lapses | None = None

    @property
    def template(self) -> Template:
        """The prompt template of the mode."""
        return load_template(CHAT) if self.chat else load_template()


LONG = Recipe(
    num_lm_rows=15360,
    num_policy_rows=23040,
    train_hops=(1, 2, 2, 3, 3, 3),
    test_hops=(1, 2, 3),
    habits=Habits(max_searches=3),
)
"""Questions of one, two and three hops."""

MARATHON_RECIPE = Recipe(
    num_lm_rows=20480,
    num_policy_rows=81920,
    train_hops=tuple(MARATHON),
    test_hops=tuple(MARATHON),
    lapses=Lapses(),
)
"""Questions of eight to twelve hops, and a demonstrator that sums up."""

CHAT_RECIPE = Recipe(chat=True, kinds=TOOL_KINDS, num_lm_rows=22528, num_policy_rows=79872)
"""A chat model that calls tools, and all kinds of questions."""


def recipe_for(args: argparse.Namespace) -> Recipe:
    """The recipe of the mode that a command line names by `long`, `marathon` or `chat`."""
    if args.marathon:
        return MARATHON_RECIPE
    return LONG if args.long else CHAT_RECIPE if args.chat else Recipe()


def worlds_of(recipe: Recipe) -> dict[str, World]:
    """Return the four worlds of a recipe: "sft", "train", "validation", "test"."""
    served = {name: recipe.num_passages * percent // 100 for name, percent in SERVED.items()}
    served["test"] = recipe.num_passages - served["train"] - served["validation"]
    return plan_worlds(recipe.seed, {"sft": recipe.num_sft_passages, **served}, articles=recipe.chat)


def build(recipe: Recipe, output_dir: Path) -> None:
    """Write `corpus.jsonl`, `{train,validation,test,sft}.parquet` and `policy_init/` into `output_dir`.

    Raises:
        DataError: the worlds are too small for the requested questions, or the folder cannot be written.
    """
    worlds = worlds_of(recipe)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write to {output_dir}: {error}; choose another --output_dir") from error
    write_corpus([worlds[name] for name in SERVED], output_dir / "corpus.jsonl")
    write_prompts(recipe, worlds, output_dir)
    with phase(f"writing demonstrations, for {recipe.num_lm_rows + recipe.num_policy_rows} warm-start rows"):
        # The demonstrations are about a world that is not served and shares no names, so they give no answer away.
        index = PassageIndex([worlds["sft"]])
        demonstrator: Demonstrator | ChatDemonstrator | MarathonDemonstrator
        if recipe.lapses is not None:
            demonstrator = MarathonDemonstrator(index, recipe.template, recipe.lapses)
        elif recipe.chat:
            demonstrator = ChatDemonstrator(index, recipe.template, recipe.habits, train_chat_tokenizer())
        else:
            demonstrator = Demonstrator(index, recipe.template, recipe.habits)
        rows = list(sft_rows(recipe, worlds["sft"], demonstrator))
        pq.write_table(pa.Table.from_pylist(rows, SFT_SCHEMA), output_dir / "sft.parquet")
    logger.info("wrote %d warm-start rows", len(rows))
    write_policy(recipe, rows[: min(len(rows), 4000)], output_dir / "policy_init")


def write_corpus(worlds: list[World], path: Path) -> None:
    """Write the served passages, one JSON object per line, without keeping them in memory."""
    with path.open("w", encoding="utf-8") as file:
        for row in stream_passages(worlds):
            file.write(json.dumps(row) + "\n")
    logger.info("wrote %d passages to %s", sum(world.num_entities for world in worlds), path)


def write_prompts(recipe: Recipe, worlds: dict[str, World], output_dir: Path) -> None:
    """Write the three prompt tables, each over its own world."""
    plans = {
        "train": (recipe.train_hops, recipe.num_train),
        "validation": (recipe.test_hops, recipe.num_validation),
        "test": (recipe.test_hops, recipe.num_test),
    }
    # The served worlds follow each other in the corpus: `first_row` is where the passages of each begin.
    sizes = [worlds[name].num_entities for name in SERVED]
    first_row = dict(zip(SERVED, itertools.accumulate(sizes, initial=0), strict=False))
    for split, (hops, count) in plans.items():
        questions = distinct_questions(worlds[split], (*hops, *recipe.kinds), count)
        rows = [
            prompt_row(question, recipe.template, split, index, _evidence(question, first_row[split]))
            for index, question in enumerate(questions)
        ]
        pq.write_table(pa.Table.from_pylist(rows), output_dir / f"{split}.parquet")
        logger.info("wrote %d %s questions", len(rows), split)


def _evidence(question: Question, first_row: int) -> list[str]:
    """The ids of the passages that a marathon leads through; those of its world begin at that row of the corpus."""
    if isinstance(question, ChainQuestion) and question.hops in MARATHON:
        return [str(first_row + entity) for entity in question.path[:-1]]
    return []


def sft_rows(
    recipe: Recipe, names: World, demonstrator: Demonstrator | ChatDemonstrator | MarathonDemonstrator
) -> Iterator[dict[str, Any]]:
    """Yield the warm-start rows: first the "lm" phase (trajectories and some bare passages), then "policy".

    All are about the entities of `names`, but each demonstration has facts of its own. So none can be learned by heart,
    and the policy has to read them. A row is a sequence of a demonstration; most have one.
    """
    num_rows = recipe.num_lm_rows + recipe.num_policy_rows
    rows = itertools.islice(_endless_rows(recipe, names, demonstrator), num_rows)
    return track(rows, "demonstrations", num_rows, "rows")


def _endless_rows(
    recipe: Recipe, names: World, demonstrator: Demonstrator | ChatDemonstrator | MarathonDemonstrator
) -> Iterator[dict[str, Any]]:
    rng = random.Random(hash_number("sft", recipe.seed))
    asked: tuple[int | str, ...] = (*recipe.test_hops, *recipe.kinds)
    # Some kinds are listed several times, so that a uniform choice draws them more often.
    kinds = [kind for kind in asked for _ in range(SFT_SHARES.get(kind, 1))]
    number = 0
    while True:
        phase = "lm" if number < recipe.num_lm_rows else "policy"
        world = replace(names, name=f"{names.name}_{number}")  # the name is part of every fact's hash
        # Some rows of the first phase are a bare passage; all others are an episode.
        if phase == "lm" and rng.random() < DOCUMENT_SHARE:
            entity = rng.randrange(world.num_entities)
            segments: list[Segment] = [("environment", world.contents(entity))]
        else:
            question = make_question(world, rng.choice(kinds), rng)
            segments = demonstrator.write(question, rng)
        for sequence in _sequences(segments):
            yield {"segments": [{"source": source, "text": text} for source, text in sequence], "phase": phase}
            number += 1


def _sequences(segments: Sequence[Segment]) -> list[list[Segment]]:
    """The segments of each sequence: a further one begins with a context."""
    sequences: list[list[Segment]] = [[]]
    for source, text in segments:
        if source == "context":
            sequences.append([])
        sequences[-1].append((source, text))
    return sequences


def write_policy(recipe: Recipe, rows: list[dict[str, Any]], path: Path) -> None:
    """Train the tokenizer on warm-start rows and save it with a model of random weights, in Hugging Face format."""
    texts = (segment["text"] for row in rows for segment in row["segments"])
    tokenizer = train_chat_tokenizer(texts) if recipe.chat else train_tokenizer(texts)
    model = make_policy(tokenizer, recipe.seed)
    disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    share(path)
    logger.info("wrote a policy of %d parameters and %d tokens", model.num_parameters(), len(tokenizer))
