"""How well an answer fits the gold answers: the metrics of open-domain question answering.

Both are normalised first: as in the SQuAD evaluation (Rajpurkar et al. 2016), or in one of two other ways. A gold
answer that normalises to nothing (the grade "A", "The The", "?") would be part of any text and equal to an empty
answer. It is compared without normalisation instead, ignoring only case and outer spaces.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

Normalize = Callable[[str], str]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_FOR_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ACCENTS = re.compile(r"[\u0300-\u036f]")
_BOOLEANS = {"true": "yes", "false": "no"}


def normalize_answer(text: str, unicode: bool = False) -> str:
    """Lower case, no ASCII punctuation ("a-b" becomes "ab"), no English articles, single spaces.

    Punctuation and diacritics outside ASCII stay as they are, except with `unicode`: then full-width and other
    compatibility letters become plain ones (NFKC), accents in the block U+0300 to U+036F are removed (an e with an
    acute becomes "e"; letters in their own right, like the Danish o, and the marks of other scripts stay), case is
    folded (a sharp s becomes "ss"), and the punctuation of all scripts is removed.
    """
    plain = _fold(text) if unicode else text.lower().translate(_NO_PUNCTUATION)
    return _without_articles(plain)


def normalize_unicode(text: str) -> str:
    """`normalize_answer` with `unicode`."""
    return normalize_answer(text, unicode=True)


def normalizer(unicode: bool) -> Normalize:
    """The normalisation of an answer component with this option."""
    return normalize_unicode if unicode else normalize_answer


def normalize_r1_searcher(text: str) -> str:
    """R1-Searcher's normalisation: ASCII punctuation becomes a space ("a-b" becomes "b"), true and false yes and no."""
    plain = _without_articles(text.lower().translate(_SPACE_FOR_PUNCTUATION))
    return _BOOLEANS.get(plain, plain)


def _without_articles(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text).split())


def _fold(text: str) -> str:
    # Folding may compose letters again, so they are decomposed before and after.
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    bare = _ACCENTS.sub("", folded).translate(_NO_PUNCTUATION)
    kept = "".join(letter for letter in bare if not unicodedata.category(letter).startswith("P"))
    return unicodedata.normalize("NFC", kept)


_CLOSED = {"yes", "no", "noanswer"}


def exact_match(prediction: str, targets: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether a target equals the prediction, both normalised."""
    return _any_fits(str.__eq__, prediction, targets, normalize)


def cover_match(prediction: str, targets: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether the prediction contains a target, both normalised: cover EM, or "acc", as published.

    It matches text, not whole words: "party" covers "art". `cover_tokens` matches whole words.
    """
    return _any_fits(lambda text, gold: gold in text, prediction, targets, normalize)


def cover_tokens(prediction: str, targets: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether the prediction contains the words of a target in a row (R1-Searcher's CEM_2)."""
    return _any_fits(lambda text, gold: f" {gold} " in f" {text} ", prediction, targets, normalize)


def cover_bag(prediction: str, targets: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether the prediction contains all words of a target, in any order (R1-Searcher's CEM_1)."""
    return _any_fits(lambda text, gold: set(gold.split()) <= set(text.split()), prediction, targets, normalize)


def token_f1(prediction: str, targets: Sequence[str], normalize: Normalize = normalize_answer) -> float:
    """The largest F1 of the bags of words of prediction and target, in [0, 1] (SQuAD).

    "yes", "no" and "noanswer", on either side, are right or wrong as a whole (HotpotQA).
    """
    text = normalize(prediction)
    return max((_f1(prediction, text, target, normalize(target)) for target in targets), default=0.0)


def contains_gold(texts: Iterable[str], targets: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether any text (a passage, a note) contains a target. One that normalises to nothing is never found."""
    golds = [gold for gold in map(normalize, targets) if gold]
    return any(gold in text for text in map(normalize, texts) for gold in golds)


def _any_fits(fits: Callable[[str, str], bool], prediction: str, targets: Sequence[str], normalize: Normalize) -> bool:
    text = normalize(prediction)
    golds = ((target, normalize(target)) for target in targets)
    return any(fits(text, gold) if gold else _same_letters(prediction, target) for target, gold in golds)


def _same_letters(prediction: str, target: str) -> bool:
    return bool(target.strip()) and prediction.strip().lower() == target.strip().lower()


def _f1(prediction: str, text: str, target: str, gold: str) -> float:
    if not gold:
        return float(_same_letters(prediction, target))
    if text != gold and not _CLOSED.isdisjoint((text, gold)):
        return 0.0
    words, gold_words = text.split(), gold.split()
    common = (Counter(words) & Counter(gold_words)).total()
    return 2 * common / (len(words) + len(gold_words))
