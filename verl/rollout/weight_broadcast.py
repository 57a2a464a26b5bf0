"""The driver's view of a weight broadcast: it forms the group, has each bucket sent and received, and dissolves the
group when something goes wrong; the bucket then goes to the engines another way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from verl.errors import WeightSyncError
from verl.rollout.fleet import Engine, Fleet
from verl.rollout.weight_stream import WeightSender
from verl.weight_sync.buckets import ExportedWeights
from verl.weight_sync.group import RECEIVED, end_group

log = logging.getLogger(__name__)


class WeightBroadcast:
    """Broadcasts weights from the trainer's first rank to all `ranks_per_engine` ranks of each engine of the fleet."""

    def __init__(self, fleet: Fleet, ranks_per_engine: int) -> None:
        self._fleet, self._ranks_per_engine = fleet, ranks_per_engine
        self._members: list[Engine] = []
        self._end_group: Callable[[], None] = lambda: None

    def prepare(self, sender: WeightSender) -> None:
        """Form a group unless there is one of exactly the current engines."""
        engines = self._fleet.engines
        if sender.is_joined and self._members == engines:
            return
        self.give_up(sender)
        self._members = list(engines)
        try:
            rendezvous = sender.open(self._ranks_per_engine * len(engines))
        except WeightSyncError as error:
            self._fail(sender, str(error))
            return
        self._end_group = partial(end_group, rendezvous)
        joined = sender.begin_join()
        places = [(rendezvous, 1 + self._ranks_per_engine * number) for number in range(len(engines))]
        if wrong := self._wrong("join_weight_group", places, joined):
            self._fail(sender, wrong)

    def received(self, bucket: ExportedWeights, sender: WeightSender) -> ExportedWeights | None:
        """The bucket once all engines have it; None if that fails, or there is no group."""
        if not sender.is_joined:
            return None
        [packed, *_] = bucket.exports.values()
        ticket = f"{bucket.index + 1} of {bucket.count} of version {bucket.version}".encode()
        if wrong := self._wrong("receive_weights", [(packed, ticket)] * len(self._members), sender.sent):
            self._fail(sender, wrong)
            return None
        return replace(bucket, exports={**bucket.exports, RECEIVED: ticket})

    def give_up(self, sender: WeightSender) -> None:
        """Dissolve the group, if there is one."""
        members, self._members = self._members, []
        if members:
            sender.leave()
            there = [engine for engine in members if engine in self._fleet.engines]
            self._fleet.ask_each("leave_weight_group", dict.fromkeys(there, ()))

    def _wrong(self, method: str, args: Sequence[tuple[Any, ...]], sender_is_done: Callable[[], None]) -> str:
        """Call `method` on all members, and wait for the sender. Returns what went wrong; empty if nothing did.

        When an engine dies, the group is ended: the others would wait for it until their time limit.
        """
        asked = dict(zip(self._members, args, strict=True))
        answers = self._fleet.ask_each(method, asked, on_loss=self._end_group)
        try:
            sender_is_done()
        except WeightSyncError as error:
            return str(error)
        if len(answers) < len(self._members):
            return "an engine has died"
        return next(filter(None, answers.values()), "")

    def _fail(self, sender: WeightSender, wrong: str) -> None:
        log.warning("weights go through Ray's object store until the next version, not by broadcast: %s", wrong)
        self.give_up(sender)
