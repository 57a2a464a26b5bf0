"""How hard a TinyWiki folder's test questions are for agents that need no training.

`.venv/bin/python -m search_r1.data.tinywiki.difficulty [--seed N] [--num_passages N] [--long | --marathon | --chat]`
prints the tables of `docs/tinywiki.md`.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from search_r1.data.tinywiki.build import SERVED, Recipe, recipe_for, worlds_of
from search_r1.data.tinywiki.demonstrator import PassageIndex
from search_r1.data.tinywiki.questions import UNKNOWN, PairQuestion, Question, distinct_questions

NAME = r"[A-Z][a-z]+(?: [A-Z][a-z]+)*"


def blind(questions: Sequence[Question]) -> list[bool]:
    """Answer every question with the most frequent answer of its kind (counted on these same questions)."""
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for question in questions:
        by_kind[question.kind].update([question.targets[0]])
    return [by_kind[question.kind].most_common(1)[0][0] == question.targets[0] for question in questions]


def one_search(questions: Sequence[Question], index: PassageIndex, topk: int) -> list[bool]:
    """Search the question itself and answer with the best span: right if an accepted answer is in a passage."""
    results = index.search([question.text for question in questions], topk)
    return [
        any(target in passage.contents for passage in passages for target in question.targets)
        for question, passages in zip(questions, results, strict=True)
    ]


def oracle(questions: Sequence[Question], index: PassageIndex) -> list[bool]:
    """Do what the question needs, one passage a search.

    Look up the named entity, read the first relation, look up what was read, and so on, and open the page where the
    passage lacks the relation; or look up both entities and compare their years.
    """
    return [_solve(question, index) in question.targets for question in questions]


def _solve(question: Question, index: PassageIndex) -> str:
    if isinstance(question, PairQuestion):
        # The text of an article ends with its year: ", dated 1950."
        texts = [found.text for [found] in index.search(question.chain, 1)]
        years = [int(text.rpartition("dated ")[2].rstrip(".")) for text in texts]
        if question.name == "arithmetic":
            return str(abs(years[0] - years[1]))
        return question.chain[years.index(min(years))]
    name = question.chain[0]
    for relation in question.relations:
        [[passage]] = index.search([name], 1)
        # A search finds only the first passage of an article, so the second one is opened by its entity.
        page = question.world.second_text(passage.entity) if question.world.articles else ""
        fact = read_fact(passage.text, relation) or read_fact(page, relation)
        if fact is None:
            return UNKNOWN
        name = fact
    return name


def read_fact(text: str, relation: str) -> str | None:
    """Return the name that a passage states for a relation, or None."""
    found = re.search(rf"\b{relation} ({NAME})", text)
    return found.group(1) if found else None


def measure(recipe: Recipe) -> dict[str, dict[str, float]]:
    """Return agent -> (name of the kind of question -> exact match, and "all") on the recipe's test questions."""
    worlds = worlds_of(recipe)
    index = PassageIndex([worlds[name] for name in SERVED])
    questions = list(distinct_questions(worlds["test"], (*recipe.test_hops, *recipe.kinds), recipe.num_test))
    agents: dict[str, Callable[[], list[bool]]] = {
        "blind": lambda: blind(questions),
        "one search, topk 1": lambda: one_search(questions, index, 1),
        "one search, topk 3": lambda: one_search(questions, index, 3),
        "oracle": lambda: oracle(questions, index),
    }
    return {name: _by_kind(questions, answer()) for name, answer in agents.items()}


def _by_kind(questions: Sequence[Question], right: Sequence[bool]) -> dict[str, float]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for question, is_right in zip(questions, right, strict=True):
        groups[question.name].append(is_right)
    return {name: sum(group) / len(group) for name, group in (*groups.items(), ("all", right))}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.data.tinywiki.difficulty", description="Print how hard the test questions are."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_passages", type=int, default=2000)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--long", action="store_true")
    mode.add_argument("--marathon", action="store_true")
    mode.add_argument("--chat", action="store_true")
    args = parser.parse_args()
    table = measure(replace(recipe_for(args), seed=args.seed, num_passages=args.num_passages))
    columns = list(table["oracle"])
    print("agent".ljust(20) + "".join(column.rjust(14) for column in columns))
    for agent, row in table.items():
        print(agent.ljust(20) + "".join(f"{row[column]:14.3f}" for column in columns))


if __name__ == "__main__":
    main()
