"""The trained roles of a run, each on a fake device: what its engine takes and does, phase by phase."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from verl.config import ActorConfig, Config, CriticConfig
from verl.config.counts import largest_mini_batch, trajectories_per_step, window_of
from verl.config.model import FsdpConfig
from verl.config.placement import RoleName, num_ranks
from verl.config.predicates import (
    anchor_moves,
    has_anchor,
    has_critic,
    needs_ref_log_probs,
    policy_topk,
    scores_in_update,
)
from verl.engine.device import DTYPES
from verl.engine.lora import adapted_layers, is_adapter
from verl.engine.model import Decoder
from verl.engine.policy_engine import PolicyEngine
from verl.engine.sharding import named_tensors, reshard
from verl.engine.slices import unread_weights
from verl.engine.value_engine import ValueEngine
from verl.phases import Phase
from verl.protocol import TrainBatch
from verl.rollout.weights.adapters import adapters_of
from verl.rollout.weights.buckets import gathered, plan_buckets
from verl.trainer.dry_run.batches import MICRO_BATCHES, Limit, for_update, largest_batch
from verl.trainer.dry_run.fake_device import FakeDevice
from verl.trainer.dry_run.gpus import Groups, groups_of
from verl.trainer.dry_run.memory import Peak
from verl.trainer.dry_run.work import Work

DEVICE = torch.device("cpu")  # autograd does not run on fake tensors that say they are on CUDA
FEW = 2  # tokens of a row that is trained


@dataclass(frozen=True)
class Pass:
    """What a role does in a phase on one rank: its peak memory and its work.

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

    `num_adapted`: parameters of adapters (and of an output layer) that are trained in place of all; 0: all are.
    """

    name: RoleName
    num_params: int
    idle: Peak
    passes: list[Pass]
    groups: Groups
    num_adapted: int = 0

    @property
    def num_trained(self) -> int:
        return self.num_adapted or self.num_params


def run_roles(config: Config, kind: str) -> list[Role]:
    """The actor (with its anchor) and the critic of `config`, as rank 0 of all, on devices of a kind: "cuda" or "cpu".

    Raises ConfigError for settings that no engine can be made of.
    """
    names: list[RoleName] = ["actor", "critic"] if has_critic(config) else ["actor"]
    return [run_role(name, config, kind) for name in names]


def run_role(name: RoleName, config: Config, kind: str, phases: Collection[Phase] = tuple(Phase)) -> Role:
    """One of the roles, in some phases only."""
    settings = config.actor_rollout_ref.actor if name == "actor" else config.critic
    dry = _Dry(config, kind, phases, num_ranks(config, name), settings.ulysses_sequence_parallel_size)
    return dry.actor() if name == "actor" else dry.critic()


class _Dry:
    """One role's process."""

    def __init__(
        self, config: Config, kind: str, phases: Collection[Phase], num_ranks: int, ranks_per_row: int
    ) -> None:
        self.original, self.num_ranks, self.kind, self.phases = config, num_ranks, kind, phases
        self.ranks_per_row, self.num_groups = ranks_per_row, num_ranks // ranks_per_row
        self.config = copy.deepcopy(config)  # with one mini-batch of what `_largest_update` makes
        self.config.actor_rollout_ref.actor.num_threads = None
        self.in_update = scores_in_update(config)
        self.device = FakeDevice(kind)
        self.passes: list[Pass] = []

    def actor(self) -> Role:
        role = self.config.actor_rollout_ref
        with self.device.running(self.num_ranks), unread_weights():
            large = self._largest_update(role.actor)
            engine = PolicyEngine(self.config, DEVICE, 2, has_anchor(self.config))
            self._update(engine, self._batch([FEW], 1))  # from now on there is an optimizer state
            idle = self.device.memory.now
            self._score(engine)
            epochs = self.original.actor_rollout_ref.actor.ppo_epochs
            self._measure(Phase.UPDATE, "update", lambda: self._update(engine, large), large, epochs)
            self._reduced_once(role.actor.fsdp_config)
            if anchor_moves(self.config):
                self._measure(Phase.UPDATE, "anchor follows", lambda: engine.follow_anchor(0.9))
            self._measure(Phase.SYNC, "weight sync", lambda: self._sync(engine))
            groups = groups_of(self.original, role.actor.fsdp_config.fsdp_size)
            num_params, num_adapted = _sizes(engine.policy)
            return Role("actor", num_params, idle, self.passes, groups, num_adapted)

    def critic(self) -> Role:
        critic = self.config.critic
        with self.device.running(self.num_ranks), unread_weights():
            large = self._largest_update(critic)
            engine = ValueEngine(self.config, DEVICE, 2)
            engine.update(self._batch([FEW], 1))
            idle = self.device.memory.now
            batch = self._batch(self._lengths(_limit(critic, "forward")), 1)
            self._measure(Phase.SCORE, "values", lambda: engine.values(batch), batch)
            epochs = self.original.critic.ppo_epochs
            self._measure(Phase.UPDATE, "critic's update", lambda: engine.update(large), large, epochs)
            self._reduced_once(critic.model.fsdp_config)
            groups = groups_of(self.original, critic.model.fsdp_config.fsdp_size, "critic")
            num_params, num_adapted = _sizes(engine.model)
            return Role("critic", num_params, idle, self.passes, groups, num_adapted)

    def _update(self, engine: PolicyEngine, batch: TrainBatch) -> None:
        (engine.update_and_score if self.in_update else engine.update)(for_update(batch, self.original))

    def _score(self, engine: PolicyEngine) -> None:
        role = self.config.actor_rollout_ref
        temperature, top_k = role.rollout.temperature, policy_topk(role.actor)
        if not self.in_update and (top_k or not role.actor.use_rollout_log_probs):
            batch = self._batch(self._lengths(_limit(role.rollout, "log_prob")), 1)
            self._measure(Phase.SCORE, "log-probs", lambda: engine.log_probs(batch, temperature, top_k=top_k), batch)
        if engine.anchor is not None and needs_ref_log_probs(self.original):
            read = self._batch(self._lengths(_limit(role.ref, "log_prob")), 1)
            self._measure(
                Phase.SCORE, "anchor's log-probs", lambda: engine.log_probs(read, temperature, "anchor"), read
            )

    def _measure(
        self, phase: Phase, name: str, run: Callable[[], object], batch: TrainBatch | None = None, epochs: int = 1
    ) -> None:
        if phase not in self.phases:
            return
        self.device.restart()
        run()
        memory, work, times = self.device.memory, self.device.work, float(epochs)
        if batch is not None:
            whole = trajectories_per_step(self.config) * window_of(self.config)
            times *= whole / int(batch.lengths_B.sum())
        self.passes.append(Pass(phase, name, memory.peak, work, times, batch is not None))

    def _reduced_once(self, fsdp: FsdpConfig) -> None:
        """What the update that was measured last sends once a mini-batch is in its work for two micro-batches or one,
        and these are repeated `times`.
        """
        if Phase.UPDATE in self.phases:
            once = ["all-reduce"] + ["reduce-scatter"] * (fsdp.reduce_gradients == "mini_batch")
            self.passes[-1].work.lessen(once, self.share_of_mini_batch)

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

    def _largest_update(self, settings: ActorConfig | CriticConfig) -> TrainBatch:
        """Two of the largest micro-batches (or the only one) of a mini-batch, which `settings` then have."""
        rows = largest_mini_batch(trajectories_per_step(self.config), settings.ppo_mini_batch_size)
        lengths = self._lengths(_limit(settings, "ppo"), rows)
        micro_batches = min(MICRO_BATCHES, -(-rows // (len(lengths) * self.num_groups)))
        batch = self._batch(lengths, micro_batches)
        self.share_of_mini_batch = min(1.0, int(batch.lengths_B.sum()) / (rows * window_of(self.config)))
        settings.ppo_mini_batch_size, settings.ppo_epochs, settings.shuffle = len(batch), 1, False
        return batch

    def _lengths(self, limit: Limit, rows: int | None = None) -> list[int]:
        """Of the largest micro-batch of the ranks that share it, when there are `rows` altogether."""
        rows = trajectories_per_step(self.config) if rows is None else rows
        most_rows = -(-rows // self.num_groups)
        return limit.of_ranks(self.ranks_per_row).row_lengths(window_of(self.config), self.num_groups, most_rows)

    def _batch(self, lengths: list[int], micro_batches: int) -> TrainBatch:
        top_k = policy_topk(self.config.actor_rollout_ref.actor)
        return largest_batch(
            lengths, self.num_groups, micro_batches, top_k, self.config.algorithm.norm_adv_by_batch_std
        )


def _sizes(model: Decoder) -> tuple[int, int]:
    """`num_params` and `num_adapted`."""
    num_params = sum(tensor.numel() for name, tensor in model.named_parameters() if not is_adapter(name))
    num_trained = sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad)
    return num_params, num_trained if any(adapted_layers(model)) else 0


def _limit(settings: object, prefix: str) -> Limit:
    """From the settings of a pass, whose names begin with `prefix`."""
    values = vars(settings)
    by_tokens = values.get(f"{prefix}_use_dynamic_bsz", values.get("use_dynamic_bsz"))
    return Limit(bool(by_tokens), values[f"{prefix}_max_token_len_per_gpu"], values[f"{prefix}_micro_batch_size"])
