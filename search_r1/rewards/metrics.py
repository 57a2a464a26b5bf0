"""How well an answer fits the gold answers: the metrics of open-domain question answering.

A gold answer that normalises to nothing (the grade "A", "The The", "?") would be part of any text and equal to an empty
answer. It is compared without normalisation instead, ignoring only case and outer spaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from search_r1.rewards.normalize import Normalize, normalize_answer

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
