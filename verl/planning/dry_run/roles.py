"""The trained roles of a run, each on a fake device: what its engine takes and does, phase by phase."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from verl.config import Config
from verl.config.rules.placement import RoleName, num_ranks
from verl.config.rules.predicates import has_anchor, has_critic, trajectories_per_step, window_of
from verl.config.sections.model import FsdpConfig
from verl.engine.device.runtime import DTYPES
from verl.engine.device.sharding import reshard
from verl.engine.files.slices import unread_weights
from verl.engine.lora import adapted_layers, is_adapter
from verl.engine.model import Decoder, named_tensors
from verl.engine.policy_engine import PolicyEngine
from verl.engine.value_engine import ValueEngine
from verl.phases import Phase
from verl.planning.dry_run.fake_device import FakeDevice
from verl.planning.dry_run.memory import Peak
from verl.planning.dry_run.passes import LargestPass, LargestPasses, Work
from verl.planning.dry_run.place import Groups, rank_groups
from verl.weight_sync.buckets import gathered, plan_buckets
from verl.weight_sync.export import adapters_of

DEVICE = torch.device("cpu")  # autograd does not run on fake tensors that say they are on CUDA


@dataclass(frozen=True)
class Pass:
    """A pass of a role in a phase, on one rank: its peak memory and its work.

    A step has `times` the `work`; where `by_tokens`, of trajectories at their limit.
    """

    phase: Phase
    name: str
    peak: Peak
    work: Work
    times: float
    by_tokens: bool


@dataclass(frozen=True)
class Role:
    """A trained role on one rank. `idle` bytes are on the device while it does nothing.

    `num_adapted`: parameters of adapters (and of an output layer) that are trained in place of all; 0: no adapters.
    `num_frozen`: parameters that are not trained without adapters, as only the last layers are.
    """

    name: RoleName
    num_params: int
    idle: Peak
    passes: list[Pass]
    groups: Groups
    num_adapted: int = 0
    num_frozen: int = 0

    @property
    def num_trained(self) -> int:
        return self.num_adapted or self.num_params - self.num_frozen


def run_roles(config: Config, kind: str, phases: Collection[Phase] = tuple(Phase)) -> list[Role]:
    """The actor (with its anchor) and the critic of `config`, as rank 0 of all, on devices of a kind: "cuda" or "cpu".
    Passes of other phases than `phases` are left out.

    Raises ConfigError for settings that no engine can be made of.
    """
    names: list[RoleName] = ["actor", "critic"] if has_critic(config) else ["actor"]
    return [run_role(name, config, kind, phases) for name in names]


def run_role(name: RoleName, config: Config, kind: str, phases: Collection[Phase] = tuple(Phase)) -> Role:
    """One of the roles of `config`, in some phases only; see `run_roles`."""
    dry = _Dry(name, config, kind, phases)
    return dry.actor() if name == "actor" else dry.critic()


class _Dry:
    """The process of one rank of a role, on a fake device."""

    def __init__(self, name: RoleName, config: Config, kind: str, phases: Collection[Phase]) -> None:
        self.name, self.config, self.kind, self.phases = name, config, kind, phases
        self.num_ranks = num_ranks(config, name)
        self.device = FakeDevice(kind)
        self.passes: list[Pass] = []

    def actor(self) -> Role:
        with self.device.running(self.num_ranks), unread_weights():
            largest = LargestPasses("actor", self.config, self.num_ranks)
            engine = PolicyEngine(largest.config, DEVICE, 2, has_anchor(self.config))
            largest.first_update(engine)
            idle = self.device.memory.now
            for one in largest.of_actor(engine):
                self._measure(one)
            self._measure(LargestPass(Phase.SYNC, "weight sync", lambda: self._sync(engine)))
            return self._role(engine.policy, idle, self.config.actor_rollout_ref.actor.fsdp_config, largest)

    def critic(self) -> Role:
        with self.device.running(self.num_ranks), unread_weights():
            largest = LargestPasses("critic", self.config, self.num_ranks)
            engine = ValueEngine(largest.config, DEVICE, 2)
            largest.first_update(engine)
            idle = self.device.memory.now
            for one in largest.of_critic(engine):
                self._measure(one)
            return self._role(engine.model, idle, self.config.critic.model.fsdp_config, largest)

    def _role(self, model: Decoder, idle: Peak, fsdp: FsdpConfig, largest: LargestPasses) -> Role:
        groups = rank_groups(self.config, fsdp.fsdp_size, self.name)
        num_params = sum(tensor.numel() for name, tensor in model.named_parameters() if not is_adapter(name))
        num_trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
        num_adapted, num_frozen = (num_trained, 0) if any(adapted_layers(model)) else (0, num_params - num_trained)
        if Phase.UPDATE in self.phases:
            # What is sent once a mini-batch is in the work of two micro-batches or one, which is repeated `times`.
            once = ["all-reduce"] + ["reduce-scatter"] * (fsdp.reduce_gradients == "mini_batch")
            update = next(one for one in self.passes if one.phase is Phase.UPDATE)
            update.work.lessen(once, largest.share_of_mini_batch)
        return Role(self.name, num_params, idle, self.passes, groups, num_adapted, num_frozen)

    def _measure(self, one: LargestPass) -> None:
        if one.phase not in self.phases:
            return
        self.device.restart()
        one.run()
        memory, work, times = self.device.memory, self.device.work, float(one.epochs)
        if one.num_tokens is not None:
            times *= trajectories_per_step(self.config) * window_of(self.config) / one.num_tokens
        self.passes.append(Pass(one.phase, one.name, memory.peak, work, times, one.num_tokens is not None))

    def _sync(self, engine: PolicyEngine) -> None:
        reshard(engine.policy)
        if self.kind == "cpu" or self.config.trainer.layout == "split":
            return  # the rows that a rank has go straight to memory that the host's processes share
        rollout, held = self.config.actor_rollout_ref.rollout, {}
        named, dtype = adapters_of(engine.policy), torch.float32
        if not named:
            named, dtype = dict(named_tensors(engine.policy)), DTYPES.get(rollout.dtype, torch.float32)
        for names in plan_buckets(named.items(), dtype, rollout.weight_sync.bucket_mib):
            held = gathered([(name, named[name]) for name in names], dtype)  # beside the one before, as the actor does
        held.clear()
