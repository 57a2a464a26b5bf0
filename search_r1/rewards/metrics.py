"""How well an answer fits the gold answers: the metrics of open-domain question answering.

A gold answer that normalises to nothing (the grade "A", "The The", "?") would be part of any text and equal to an empty
answer. It is compared by its letters alone instead: it fits an answer that is the same but for case and outer spaces.
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
    """Whether a target is a part of the prediction, both normalised: cover EM, or "acc", as published.

    It is a part of the text, not of its words: "party" covers "art". `cover_tokens` looks at whole words.
    """
    return _any_fits(lambda text, gold: gold in text, prediction, targets, normalize)


def cover_tokens(prediction: str, targets: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether the words of a target stand in the prediction one after the other (R1-Searcher's CEM_2)."""
    return _any_fits(lambda text, gold: f" {gold} " in f" {text} ", prediction, targets, normalize)


def cover_bag(prediction: str, targets: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether all words of a target stand in the prediction, in any order (R1-Searcher's CEM_1)."""
    return _any_fits(lambda text, gold: set(gold.split()) <= set(text.split()), prediction, targets, normalize)


def token_f1(prediction: str, targets: Sequence[str], normalize: Normalize = normalize_answer) -> float:
    """The largest F1 of the bags of words of prediction and target, in [0, 1] (SQuAD).

    "yes", "no" and "noanswer", on either side, are right or wrong as a whole (HotpotQA).
    """
    text = normalize(prediction)
    return max((_f1(prediction, text, target, normalize(target)) for target in targets), default=0.0)


def contains_gold(texts: Iterable[str], targets: Sequence[str], normalize: Normalize = normalize_answer) -> bool:
    """Whether a target is a part of a text (a passage, a note). One that normalises to nothing never is."""
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
