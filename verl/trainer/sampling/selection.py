"""Which groups a step trains on, decided while they are being completed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl.rollout.groups import Group


@dataclass
class Selection:
    """Collects `wanted` useful groups from at most `most`; each useless group is replaced at once by a new one.

    `due` are groups that cannot wait for another step: they are taken, however long they take. If there are more groups
    than wanted, the first to complete are taken. `in_order` decides about a group only when all groups before it are
    complete, so that the decision does not depend on timing.

    new_groups: makes so many groups of the next prompts.
    are_useful: for each group, whether it is; None if that is not known yet. It is called again with those groups, and
    with true as its second argument when it has to wait until it knows.
    """

    wanted: int
    most: int
    new_groups: Callable[[int], list[Group]]
    are_useful: Callable[[Sequence[Group], bool], Sequence[bool | None]]
    groups: list[Group]
    due: list[Group] = field(default_factory=list)
    in_order: bool = False
    useful: list[Group] = field(default_factory=list)  # in the order in which they were completed
    useless: list[Group] = field(default_factory=list)
    _undecided: list[Group] = field(default_factory=list)

    def next_groups(self, complete: Sequence[Group], wait: bool) -> list[Group] | None:
        """The groups to begin now; see `verl.rollout.episode_queue.NextGroups`."""
        self._undecided += complete
        asked = self._leading() if self.in_order else list(self._undecided)
        answers = dict(zip(asked, self.are_useful(asked, wait) if asked else [], strict=True))
        self._undecided = [group for group in self._undecided if answers.get(group) is None]
        self.useful += [group for group, is_useful in answers.items() if is_useful]
        new_useless = [group for group, is_useful in answers.items() if is_useful is False]
        self.useless += new_useless
        if len(self.useful) >= self.wanted and all(group in self.useful + self.useless for group in self.due):
            return None
        new = self.new_groups(max(0, min(len(new_useless), self.most - len(self.groups))))
        self.groups += new
        return new

    @property
    def taken(self) -> list[Group]:
        """The groups that the step trains on, at most `wanted`, in the order in which they were begun."""
        first = sorted(self.useful, key=lambda group: group not in self.due)[: self.wanted]
        return in_order_of_beginning(first)

    @property
    def left(self) -> list[Group]:
        """Groups that continue in the next step: first the complete ones, then the others."""
        gone = [*self.taken, *self.useless]
        left = in_order_of_beginning([group for group in self.groups if group not in gone])
        return sorted(left, key=lambda group: not group.is_complete)

    def _leading(self) -> list[Group]:
        decided = [*self.useful, *self.useless]
        leading: list[Group] = []
        for group in self.groups:
            if group in self._undecided:
                leading.append(group)
            elif group not in decided:
                break
        return leading


def in_order_of_beginning(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: (group.step, group.number))
