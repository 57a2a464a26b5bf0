"""Names of the fictional encyclopedia: a bijection between slot numbers and sets of words.

Every title and alias is a few words of one closed set, so a small tokenizer covers all worlds. A slot is a number;
distinct slots give distinct names, so worlds that own disjoint slot ranges share no name. No two names consist of the
same words in another order: a bag-of-words search could not distinguish them. With W words, the first `W choose 2`
slots are two-word names, the next `W choose 3` three-word names, and so on.
"""

import hashlib
from bisect import bisect_right
from functools import lru_cache
from math import comb, gcd

ONSETS = (
    "Bar",
    "Cal",
    "Dor",
    "Fen",
    "Gal",
    "Hel",
    "Jor",
    "Kel",
    "Lan",
    "Mor",
    "Nol",
    "Pel",
    "Rav",
    "Sel",
    "Tor",
    "Vel",
)
CODAS = ("ba", "den", "fis", "gon", "hai", "kir", "lum", "mar", "nis", "pet", "rud", "sto", "wyn")
WORDS = tuple(onset + coda for onset in ONSETS for coda in CODAS)
MIN_WORDS = 2


def name_of(slot: int, seed: int) -> str:
    """Return the name of a slot: different words joined by one space.

    Args:
        slot: 0, 1, 2, ...; two slots never give the same name under one seed.
        seed: shuffles which slot gets which name.
    """
    num_words, rank = _length_and_rank(slot)
    factor, shift = _affine(comb(len(WORDS), num_words), seed, num_words)
    rank = (rank * factor + shift) % comb(len(WORDS), num_words)
    words = _combination(rank, num_words)
    return " ".join(words if rank % 2 else reversed(words))


def _length_and_rank(slot: int) -> tuple[int, int]:
    num_words = MIN_WORDS
    while slot >= comb(len(WORDS), num_words):
        slot -= comb(len(WORDS), num_words)
        num_words += 1
    return num_words, slot


def _combination(rank: int, num_words: int) -> list[str]:
    """The rank-th set of `num_words` words in the combinatorial number system, largest word first."""
    words = []
    for left in range(num_words, 0, -1):
        column = _column(left)
        index = bisect_right(column, rank) - 1
        rank -= column[index]
        words.append(WORDS[index])
    return words


@lru_cache(maxsize=16)
def _column(left: int) -> list[int]:
    return [comb(index, left) for index in range(len(WORDS))]


@lru_cache(maxsize=256)
def _affine(size: int, seed: int, salt: int) -> tuple[int, int]:
    factor = hash_number("name-factor", seed, salt) % size
    while gcd(factor, size) != 1:
        factor = (factor + 1) % size
    return factor, hash_number("name-shift", seed, salt) % size


def hash_number(*parts: object) -> int:
    """Return a 64-bit number that depends on nothing but the parts (the same on every machine and run)."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
