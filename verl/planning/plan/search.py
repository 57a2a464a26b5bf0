"""Searches for the layout with the fastest step among those that fit.

A layout says which nodes only sample, the engines, the copies of the model, what waits in host memory, and the
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from verl.config import Config, check_supported
from verl.config.rules.placement import critic_gpus, num_ranks, placement_of
from verl.config.rules.predicates import window_of
from verl.engine.files.loading import ModelShape
from verl.errors import ConfigError
from verl.phases import Phase
from verl.planning.dry_run.device import DeviceUse
from verl.planning.dry_run.machine import COMPUTING, HOST, HOST_LINK, NETWORK, Cost, Machine
from verl.planning.dry_run.place import Place, located
from verl.planning.dry_run.report import FILLED
from verl.planning.dry_run.roles import Role, run_roles
from verl.planning.dry_run.run import Level, judged
from verl.planning.plan.sampling import expected_trajectories, sampling_cost

TOKENS = (4, 2, 1)  # windows in a micro-batch, tried from the largest on
ACTOR, CRITIC, REFERENCE = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"


@dataclass(frozen=True)
class Sharding:
    """The layout of the trained roles: `fsdp_size` ranks share a copy (-1: all), `offload` to host memory between
    phases, `tokens` in a micro-batch of a rank. Of all nodes, `sampling_nodes` only sample; `critic` GPUs of each of
    the others are the critic's alone, as the user has set.
    """

    fsdp_size: int
    offload: bool
    tokens: int
    sampling_nodes: int = 0
    critic: int = 0

    @classmethod
    def of(cls, config: Config) -> Sharding:
        """The sharding of a config, in which the user's settings override a plan's."""
        actor = config.actor_rollout_ref.actor
        sampling_nodes = config.actor_rollout_ref.rollout.nnodes
        fsdp = actor.fsdp_config
        tokens = actor.ppo_max_token_len_per_gpu
        return cls(fsdp.fsdp_size, fsdp.param_offload, tokens, sampling_nodes, critic_gpus(config))

    @property
    def settings(self) -> list[str]:
        offload = str(self.offload).lower()
        # Where the actor has a copy on each node, the critic has one on its own GPUs of each.
        critic_fsdp_size = self.critic if self.critic and self.fsdp_size != -1 else self.fsdp_size
        nodes = ["trainer.layout=split", f"actor_rollout_ref.rollout.nnodes={self.sampling_nodes}"]
        return [
            f"{ACTOR}.fsdp_config.fsdp_size={self.fsdp_size}",
            f"{CRITIC}.model.fsdp_config.fsdp_size={critic_fsdp_size}",
            *(f"{ACTOR}.fsdp_config.{part}_offload={offload}" for part in ("param", "optimizer")),
            *(f"{CRITIC}.model.fsdp_config.{part}_offload={offload}" for part in ("param", "optimizer")),
            f"{REFERENCE}.fsdp_config.param_offload={offload}",
            f"{ACTOR}.use_dynamic_bsz=true",
            f"{ACTOR}.ppo_max_token_len_per_gpu={self.tokens}",
            f"{CRITIC}.ppo_max_token_len_per_gpu={self.tokens}",
            *(nodes if self.sampling_nodes else []),
            *([f"{CRITIC}.n_gpus_per_node={self.critic}"] if self.critic else []),
        ]

    def __str__(self) -> str:
        copies = "one copy" if self.fsdp_size == -1 else f"a copy on {self.fsdp_size}"
        nodes = f"{self.sampling_nodes} node{'s' * (self.sampling_nodes > 1)}"
        apart = f"{nodes} for sampling, " if self.sampling_nodes else ""
        apart += f"{self.critic} of a node for the critic, " if self.critic else ""
        return f"{apart}{copies}, {'offload' if self.offload else 'no offload'}, {self.tokens} tokens"


def shardings(config: Config) -> Iterator[list[Sharding]]:
    """The shardings to try, in families of which the first that fits is taken. Offloading costs time: it comes last."""
    trainer, apart = config.trainer, config.actor_rollout_ref.rollout.nnodes
    own = trainer.layout == "split"  # the user has divided the devices
    for sampling_nodes in [apart] if own else sorted({0, trainer.nnodes // 2}):  # none alone, or half of the nodes
        training = trainer.nnodes if own else trainer.nnodes - sampling_nodes
        a_node = num_ranks(config, "actor") // trainer.nnodes
        for size in [-1] if training == 1 else [-1, a_node]:
            yield [
                Sharding(size, offload, windows * window_of(config), sampling_nodes, critic_gpus(config))
                for offload in ((False,) if trainer.device == "cpu" else (False, True))
                for windows in TOKENS
            ]


def engine_sizes(config: Config) -> list[int]:
    """The GPUs of an engine: powers of two that divide those of a node that sample. On CPU an engine is one process."""
    if config.trainer.device == "cpu":
        return [1]
    sampling = placement_of(config, "cuda").sampling
    return [size for size in (1, 2, 4, 8, 16) if sampling % size == 0]


MOVED = {"param_offload": 4, "optimizer_offload": 8}  # bytes a parameter, in each direction
COPIES = 8  # bytes that go through memory for each byte of a weight that an engine is given: cast, gather, load
Loader = Callable[[Sequence[str]], Config]
MOST = 4096  # GPUs
FACTOR = 4


@dataclass(frozen=True)
class Planned:
    """A layout, whether it fits, and what a step of it takes. `engine`: the GPUs of an engine; `room`: whether it holds
    a sequence; `sent`: bytes of one rank in a step by the link that they go over.
    """

    engine: int
    sharding: Sharding
    config: Config
    level: Level
    verdict: str
    room: bool
    phases: list[DeviceUse]
    costs: Mapping[Phase, Cost]
    sent: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs.values())

    @property
    def slowest(self) -> Phase:
        return max(self.costs, key=lambda phase: self.costs[phase].seconds)

    @property
    def bottleneck(self) -> str:
        """The slowest phase, and what it waits for."""
        return f"{self.slowest}: {self.costs[self.slowest].bound_by}"

    @property
    def settings(self) -> list[str]:
        return [*engine_settings(self.engine), *self.sharding.settings]

    @property
    def fits(self) -> bool:
        return self.level != "FAIL"


def search(
    load: Loader, place: Place, policy: ModelShape, machine: Machine, tell: Callable[[str], None]
) -> Iterator[Planned]:
    """Try layouts, and yield each that was tried.

    `load` makes a run's settings from a layout's; what the user has set is kept.
    """
    tried: set[Sharding] = set()
    for family in shardings(placed(load, [], place)):
        for wanted in family:
            config = _possible(load, wanted, place)
            if config is None:
                break
            sharding = Sharding.of(config)
            if sharding in tried:
                continue
            tried.add(sharding)
            tell(f"dry run: {sharding}")
            roles = run_roles(config, place.kind)
            plan = partial(planned, load, sharding=sharding, roles=roles, place=place, policy=policy, machine=machine)
            found = list(_engines(map(plan, engine_sizes(config))))
            yield from found
            if any(one.fits for one in found):
                break


def _engines(by_size: Iterable[Planned]) -> Iterator[Planned]:
    """The plan with the smallest engines that have room for a sequence, and where these fit also with the next larger
    ones.
    """
    before: Planned | None = None
    for found in by_size:
        if not found.room or (before and found.engine == before.engine):
            continue
        yield found
        if before is not None or not found.fits:
            return
        before = found


def planned(
    load: Loader,
    engine: int,
    sharding: Sharding,
    roles: list[Role],
    place: Place,
    policy: ModelShape,
    machine: Machine,
) -> Planned:
    """The plan of a layout whose roles have been run."""
    config = placed(load, [*engine_settings(engine), *sharding.settings], place)
    found = judged(config, roles, place, policy)
    costs = {phase: Cost() for phase in Phase}
    costs[Phase.SAMPLE] = sampling_cost(config, policy, place, machine, expected_trajectories(config, FILLED))

    # Roles work one after the other on the same GPUs; a critic on GPUs of its own works beside the actor.
    worked = [_worked(config, role, machine) for role in roles]
    for phase in (Phase.SCORE, Phase.UPDATE, Phase.SYNC):
        of_roles = [by_phase[phase] for by_phase in worked]
        if critic_gpus(config):
            costs[phase] += max(of_roles, key=lambda cost: cost.seconds)
        else:
            costs[phase] += sum(of_roles, Cost())

    # New weights are loaded by the engines, and sent to those on other nodes.
    loading = COPIES * roles[0].num_params * 2 / machine.memory_bytes
    costs[Phase.SYNC] += Cost(loading, {COMPUTING: loading})
    costs[Phase.SYNC] += sending_weights(config, 2 * roles[0].num_adapted or roles[0].num_params, place, machine)
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size  # the user's, if they have set it
    sent = _sent(config, roles)
    return Planned(size, sharding, config, found.level, found.verdict, found.room, found.phases, costs, sent)


def placed(load: Loader, settings: Sequence[str], place: Place) -> Config:
    """The config of the run with `settings`, on the devices of `place`. Raises ConfigError."""
    config = located(load(settings), place)
    check_supported(config)
    return config


def _possible(load: Loader, wanted: Sharding, place: Place) -> Config | None:
    """The config of a layout; None where the user's settings leave no such layout."""
    try:
        return placed(load, wanted.settings, place)
    except ConfigError:
        if wanted.sampling_nodes:
            return None
        raise


def engine_settings(size: int) -> list[str]:
    return [f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"]


def best_of(found: Sequence[Planned]) -> Planned | None:
    """The fastest layout that fits; one that barely fits only if no other does."""
    for level in ("ok", "warn"):
        if fitting := [one for one in found if one.level == level]:
            return min(fitting, key=lambda one: one.seconds)
    return None


def _worked(config: Config, role: Role, machine: Machine) -> dict[Phase, Cost]:
    """The cost of a role's work in each phase, and of its way between host memory and its GPU."""
    costs = {phase: _moving(config, role, phase) for phase in (Phase.SCORE, Phase.UPDATE, Phase.SYNC)}
    for one in role.passes:
        cost = machine.cost(one.work, role.groups, FILLED if one.by_tokens else 1.0)
        costs[one.phase] += cost.times(max(1.0, one.times))
    return costs


def _sent(config: Config, roles: Sequence[Role]) -> dict[str, float]:
    """The bytes that one rank sends by where they go; of two roles on different GPUs, of the one that sends more."""
    by_role = [dict.fromkeys(("in node", "between nodes"), 0.0) for _ in roles]
    for sent, role in zip(by_role, roles, strict=True):
        for one in role.passes:
            for kind, num_bytes in one.work.sent.items():
                where = "in node" if role.groups.of(kind)[1] else "between nodes"
                sent[where] += num_bytes * max(1.0, one.times)
    together = max if critic_gpus(config) else sum
    return {where: together([sent[where] for sent in by_role]) for where in by_role[0]}


def sending_weights(config: Config, num_values: int, place: Place, machine: Machine) -> Cost:
    """The cost of sending the policy, or its adapters, to nodes that only sample, as `num_values` of two bytes: a
    broadcast sends each byte once over each link of its ring, Ray's object store once to each node, from one that
    trains.
    """
    rollout, num_bytes = config.actor_rollout_ref.rollout, 2 * num_values
    if not rollout.nnodes:
        return Cost()
    if rollout.weight_sync.is_broadcast(place.kind):
        seconds = num_bytes / machine.network_bytes
    else:
        seconds = num_bytes / min(machine.object_bytes, machine.network_bytes / rollout.nnodes)
    return Cost(seconds, {NETWORK: seconds})


def _moving(config: Config, role: Role, phase: Phase) -> Cost:
    """The cost of moving a role's parts between host memory and its GPU, and back, in each phase that needs them."""
    settings = (config.actor_rollout_ref.actor if role.name == "actor" else config.critic.model).fsdp_config
    if role.name == "critic" and phase is Phase.SYNC:
        return Cost()
    parts = ("param_offload", "optimizer_offload") if phase is Phase.UPDATE else ("param_offload",)
    values = {"param_offload": role.num_params, "optimizer_offload": role.num_trained}
    moved = sum(MOVED[part] * values[part] for part in parts if getattr(settings, part))
    seconds = 2 * moved / role.groups.shard / HOST_LINK
    return Cost(seconds, {HOST: seconds}) if seconds else Cost()


# One layout and batch on more and more nodes: where more of them stop paying off.


@dataclass(frozen=True)
class Scaled:
    """A layout on `num_gpus`; `efficiency`: speed-up over the first layout, divided by the ideal one."""

    num_gpus: int
    planned: Planned
    efficiency: float


def scaled(load: Loader, first: Planned, place: Place, policy: ModelShape, machine: Machine) -> Iterator[Scaled]:
    """The plan on more and more GPUs, beginning with its own; each size takes a dry run."""
    yield Scaled(place.num_devices, first, 1.0)
    for number in _numbers(place.num_devices):
        larger = replace(place, num_devices=number)
        apart = first.sharding.sampling_nodes * number // place.num_devices
        sharding = replace(first.sharding, sampling_nodes=apart)
        roles = run_roles(placed(load, [*engine_settings(first.engine), *sharding.settings], larger), place.kind)
        found = planned(load, first.engine, sharding, roles, larger, policy, machine)
        yield Scaled(number, found, first.seconds * place.num_devices / (found.seconds * number))


def _numbers(first: int) -> Iterator[int]:
    """The numbers of GPUs to try: multiples of the first up to the last one that is no more than `MOST`."""
    number, last = first * FACTOR, MOST // first * first
    while number < last:
        yield number
        number *= FACTOR
    if last > first:
        yield last
