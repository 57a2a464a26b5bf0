"""How hard a TinyWiki folder's test questions are for agents that need no training.

`.venv/bin/python -m search_r1.data.tinywiki.difficulty [--seed N] [--num_passages N] [--long]` prints the table of
`docs/tinywiki.md`.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from search_r1.data.tinywiki.build import LONG, SERVED, Recipe, worlds_of
from search_r1.data.tinywiki.demonstrator import PassageIndex
from search_r1.data.tinywiki.questions import ChainQuestion, distinct_questions

NAME = r"[A-Z][a-z]+(?: [A-Z][a-z]+)*"


def blind(questions: Sequence[ChainQuestion]) -> list[bool]:
    """Answer every question with the most frequent answer of its kind (counted on these same questions)."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for question in questions:
        by_kind[question.kind].update([question.targets[0]])
    return [by_kind[question.kind].most_common(1)[0][0] == question.targets[0] for question in questions]


def one_search(questions: Sequence[ChainQuestion], index: PassageIndex, topk: int) -> list[bool]:
    """Search the question itself and answer with the best span: right if an accepted answer is in a passage."""
    results = index.search([question.text for question in questions], topk)
    return [
        any(target in passage.contents for passage in passages for target in question.targets)
        for question, passages in zip(questions, results, strict=True)
    ]


def oracle(questions: Sequence[ChainQuestion], index: PassageIndex) -> list[bool]:
    """Look up the named entity, read the first relation, look up what was read, and so on; one passage a search."""
    return [_follow(question, index) in question.targets for question in questions]


def _follow(question: ChainQuestion, index: PassageIndex) -> str | None:
    name: str | None = question.chain[0]
    for relation in question.relations:
        if name is None:
            return None
        name = read_fact(index.search([name], 1)[0][0].text, relation)
    return name


def read_fact(text: str, relation: str) -> str | None:
    """Return the name that a passage states for a relation, or None."""
    found = re.search(rf"\b{relation} ({NAME})", text)
    return found.group(1) if found else None


def measure(recipe: Recipe) -> dict[str, dict[str, float]]:
    """Return agent -> (hops -> exact match, and "all") on the recipe's test questions."""
    worlds = worlds_of(recipe)
    index = PassageIndex([worlds[name] for name in SERVED])
    drawn = distinct_questions(worlds["test"], recipe.test_hops, recipe.num_test)
    questions = [question for question in drawn if isinstance(question, ChainQuestion)]
    agents: dict[str, Callable[[], list[bool]]] = {
        "blind": lambda: blind(questions),
        "one search, topk 1": lambda: one_search(questions, index, 1),
        "one search, topk 3": lambda: one_search(questions, index, 3),
        "oracle": lambda: oracle(questions, index),
    }
    return {name: _by_hops(questions, answer()) for name, answer in agents.items()}


def _by_hops(questions: Sequence[ChainQuestion], right: Sequence[bool]) -> dict[str, float]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for question, is_right in zip(questions, right, strict=True):
        groups[f"{question.hops}-hop"].append(is_right)
        groups["all"].append(is_right)
    return {name: sum(group) / len(group) for name, group in sorted(groups.items())}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.data.tinywiki.difficulty", description="Print how hard the test questions are."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_passages", type=int, default=2000)
    parser.add_argument("--long", action="store_true")
    args = parser.parse_args()
    table = measure(replace(LONG if args.long else Recipe(), seed=args.seed, num_passages=args.num_passages))
    columns = list(table["oracle"])
    print("agent".ljust(20) + "".join(column.rjust(8) for column in columns))
    for agent, row in table.items():
        print(agent.ljust(20) + "".join(f"{row[column]:8.3f}" for column in columns))


if __name__ == "__main__":
    main()
