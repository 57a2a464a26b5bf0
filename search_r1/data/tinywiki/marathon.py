"""The demonstrator of marathons: questions of many hops, in a window that holds a few, so that it has to sum up.

It plans aloud. A thought is what is left of the question: `the mayor of the birthplace of Fenden Calnis` while it looks
up Fenden Calnis. Its passage states the birthplace, Galrud Pelhai, and `the mayor of Galrud Pelhai` is left. A summary
is what is left, too: with the passage that follows it, nothing else is needed.

It errs by chance: sometimes it sums up only the name that it has just looked up, and then answers with a fact of its
passage, since it no longer knows what was asked; sometimes it reads the wrong fact. A policy that imitates it does so
as often, many times in an episode. What to keep is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from search_r1.data.tinywiki.demonstrator import (
    PassageIndex,
    Segment,
    WorldPassage,
    answer_turn,
    observation,
    search_turn,
)
from search_r1.data.tinywiki.questions import ChainQuestion, Question
from search_r1.llm_agent.templates import Template
from verl.agent.environment import SUMMARY_TAG

REQUEST = "Sum up."
"""`agent.summary_request` of the runs that are trained on marathons."""

TOPK = 4
"""Passages of a search: the first is that of the name, the others fill the window."""

MAX_SEARCHES_BETWEEN = 2
"""Between two summaries there are so many searches at most. When a run asks depends on its tokens."""


@dataclass(frozen=True)
class Lapses:
    """The probabilities with which the demonstrator errs: in a summary, and at a passage."""

    forget: float = 0.12
    misread: float = 0.02


@dataclass
class MarathonDemonstrator:
    """Writes trajectories about the world of each question; a search shows it `TOPK` passages. See `Demonstrator`."""

    index: PassageIndex
    template: Template
    lapses: Lapses = Lapses()

    def write(self, question: Question, rng: random.Random) -> list[Segment]:
        """Return one trajectory as segments. A summary is followed by a context, the prompt, and by the reply that was
        held back for it, behind the summary."""
        assert isinstance(question, ChainQuestion), "a marathon is a chain of relations"
        world, name, left = question.world, question.chain[0], list(question.relations)
        asked = self.template.messages(question.text)[0]["content"]
        segments: list[Segment] = [("prompt", asked)]
        until_summary = rng.randint(1, MAX_SEARCHES_BETWEEN)
        while True:
            # Look the name up.
            segments.append(("policy", search_turn(what_is_left(left, name), name)))
            [found] = self.index.search([name], TOPK)
            shown = observation([WorldPassage(world.name, one.entity, world.contents(one.entity)) for one in found])
            # Before the passage is read, it may have to sum up.
            until_summary -= 1
            is_lost = False
            if until_summary:
                segments.append(("environment", shown))
            else:
                is_lost = rng.random() < self.lapses.forget
                segments += summed_up(asked, name if is_lost else what_is_left(left, name), shown)
                until_summary = rng.randint(1, MAX_SEARCHES_BETWEEN)
            # Note a fact of the passage.
            facts = world.facts(found[0].entity)
            relation = left.pop(0)
            reads = relation in facts and not is_lost and rng.random() >= self.lapses.misread
            name = facts[relation] if reads else rng.choice(list(facts.values()))
            if is_lost or not left:
                return [*segments, ("policy", answer_turn(name, name))]


def what_is_left(relations: Sequence[str], name: str) -> str:
    """The question that is left at an entity, e.g. `the mayor of the birthplace of Fenden Calnis`."""
    return "".join(f"the {relation} of " for relation in reversed(relations)) + name


def summed_up(asked: str, summary: str, reply: str) -> list[Segment]:
    """The request for a summary, the summary, and what the next sequence begins with, as in a run."""
    turn = f"<{SUMMARY_TAG}> {summary} </{SUMMARY_TAG}>"
    request = f"\n\n{REQUEST}\n\n"
    return [("environment", request), ("policy", turn), ("context", asked), ("environment", f"{turn}{reply}")]
