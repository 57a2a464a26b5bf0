"""Passages and vectors of any number, made like real ones: what the retrieval benchmarks search.

    .venv/bin/python scripts/bench/retrieval_data.py --like wiki.jsonl.gz --rows 200000 --folder runs/bench \\
        --model MINILM

Passages: about 100 words drawn with the frequencies of the words of `--like`; three of them belong to one article and
share 30 words of its own. Vectors: those of the real passages, each with noise that has the covariance of all, of
length 1. Questions: words of one passage each. Nothing is made twice: a file that exists is kept.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from search_r1.search.jsonl import read_objects

_WORDS, _TOPIC_WORDS, _ARTICLE = 100, 30, 3
_TOPIC_SHARE = 0.25  # of a passage's words
_BLOCK = 30_000


def read_passages(path: Path) -> list[str]:
    """The field `contents` of each line of a .jsonl or .jsonl.gz file."""
    return [row["contents"] for _, row in read_objects(path)]


def make_corpus(like: list[str], rows: int, target: Path, seed: int = 0) -> Path:
    """Write `rows` passages as JSON lines to `target` unless it exists."""
    if target.exists():
        return target
    counts = Counter(word for passage in like for word in re.findall(r"[^\W_]+", passage))
    words = np.array(list(counts))
    ends = np.cumsum(np.array(list(counts.values()), dtype=np.float64))
    random, part = np.random.default_rng(seed), target.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        for start in range(0, rows, _BLOCK):
            for row, text in enumerate(_texts(words, ends, min(_BLOCK, rows - start), random), start):
                file.write(json.dumps({"id": str(row), "contents": text}, ensure_ascii=False) + "\n")
    return part.rename(target)


def _texts(words: np.ndarray, ends: np.ndarray, rows: int, random: np.random.Generator) -> Iterator[str]:
    """`_BLOCK` is a multiple of `_ARTICLE`, so that no article spans two blocks."""
    articles = -(-rows // _ARTICLE)
    topics = random.integers(len(words), size=(articles, _TOPIC_WORDS))  # of all words alike: topics are rare words
    common = np.searchsorted(ends, random.random((rows, _WORDS)) * ends[-1], side="right")
    own = topics[np.arange(rows)[:, None] // _ARTICLE, random.integers(_TOPIC_WORDS, size=(rows, _WORDS))]
    chosen = np.where(random.random((rows, _WORDS)) < _TOPIC_SHARE, own, common)
    for row in range(rows):
        title = " ".join(words[topics[row // _ARTICLE, :2]])
        yield f'"{title}"\n{" ".join(words[chosen[row]])}'


def make_questions(corpus: Path, number: int, target: Path, seed: int = 0) -> Path:
    """Write questions of eight to ten words, half of them of one passage each, to `target` unless it exists."""
    if target.exists():
        return target
    random = np.random.default_rng(seed)
    passages = read_passages(corpus)
    with target.open("w", encoding="utf-8") as file:
        for row in random.integers(len(passages), size=number):
            one, two, three, four = random.choice(passages[row].replace('"', "").split(), size=4, replace=False)
            text = f"what is the {one} {two} of {three} and {four}?"
            file.write(json.dumps({"question": text, "row": int(row)}) + "\n")
    return target


def make_vectors(seeds_SD: np.ndarray, rows: int, target: Path, seed: int = 0) -> Path:
    """Write float32 [rows, D] without header to `target` unless it exists: the seeds in turn, with noise."""
    if target.exists():
        return target
    random, part = np.random.default_rng(seed), target.with_suffix(".part")
    root_DD = np.linalg.cholesky(np.cov(seeds_SD, rowvar=False) + 1e-8 * np.eye(seeds_SD.shape[1])).astype(np.float32)
    with part.open("wb") as file:
        for start in range(0, rows, _BLOCK):
            row_B = np.arange(start, min(start + _BLOCK, rows))
            noise_BD = random.standard_normal((len(row_B), seeds_SD.shape[1]), dtype=np.float32) @ root_DD.T
            block_BD = seeds_SD[row_B % len(seeds_SD)] + noise_BD
            file.write((block_BD / np.linalg.norm(block_BD, axis=1, keepdims=True)).astype(np.float32).tobytes())
    return part.rename(target)


def make_seeds(like: list[str], model: str, target: Path, num_threads: int = 1) -> np.ndarray:
    """The vectors of real passages, float32 [S, D], kept in `target`."""
    if not target.exists():
        from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions

        encoder = Encoder(EncoderOptions("minilm", model, precision="auto", num_threads=num_threads))
        np.save(target, encoder.encode_passages(like, 128))
    return np.load(target)


def main() -> None:
    """Make both files."""
    parser = argparse.ArgumentParser(description="Make passages and vectors like real ones.")
    parser.add_argument("--like", type=Path, required=True, help="a real corpus, .jsonl or .jsonl.gz")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--model", help="folder of a MiniLM encoder; without it no vectors are made")
    parser.add_argument("--num_threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    like = read_passages(arguments.like)
    corpus = make_corpus(like, arguments.rows, arguments.folder / f"passages_{arguments.rows}.jsonl")
    print(corpus)
    print(make_questions(corpus, 20_000, arguments.folder / f"questions_{arguments.rows}.jsonl"))
    if arguments.model:
        seeds_SD = make_seeds(like, arguments.model, arguments.folder / "seeds.npy", arguments.num_threads)
        print(make_vectors(seeds_SD, arguments.rows, arguments.folder / f"vectors_{arguments.rows}.f32"))


if __name__ == "__main__":
    main()
