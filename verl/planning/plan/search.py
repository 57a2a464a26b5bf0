"""Searches for the layout with the fastest step among those that fit, or for a simpler one that is hardly slower."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from verl.config import Config, check_supported
from verl.config.rules.placement import TENSOR_PARALLEL, critic_gpus
from verl.config.sections.fields import value_at
from verl.engine.files.loading import ModelShape
from verl.errors import ConfigError
from verl.phases import Phase
from verl.planning.dry_run.device import CUDA_PROCESS, UTILIZATION, AtOnce, DeviceUse, highest_utilization
from verl.planning.dry_run.machine import COMPUTING, HOST, HOST_LINK, NETWORK, Cost, Machine
from verl.planning.dry_run.place import NODE, Place, located
from verl.planning.dry_run.report import FILLED
from verl.planning.dry_run.roles import Role
from verl.planning.dry_run.run import Level, judged
from verl.planning.plan.layouts import Sharding, engine_sizes, least_bytes, shardings
from verl.planning.plan.measure import Measured
from verl.planning.plan.sampling import ASSUMED, NONE, expected_trajectories, sampling_cost

MOVED = {"param_offload": 4, "optimizer_offload": 8}  # bytes a parameter, in each direction
COPIES = 8  # bytes that go through memory for each byte of a weight that an engine is given: cast, gather, load
Loader = Callable[[Sequence[str]], Config]
MOST = 4096  # GPUs
FACTOR = 4


@dataclass(frozen=True)
class Machines:
    """What a step is timed by. `floor`: at the rates of a data sheet, without waiting, on the fastest kind of GPU that
    is meant; `expected`: at the shares of these that are usually reached, on the slowest. One machine that was measured
    is both.
    """

    floor: Machine
    expected: Machine


@dataclass(frozen=True)
class Planned:
    """A layout, whether it fits, and what a step of it takes. `engine`: the GPUs of an engine; `at_once`: the
    trajectories that it samples at once; `floor`: the least seconds of a step; `costs`: the estimate, by phase; `sent`:
    bytes of one rank in a step by the link that they go over.
    """

    engine: int
    sharding: Sharding
    config: Config
    level: Level
    verdict: str
    at_once: AtOnce
    phases: list[DeviceUse]
    floor: float
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
    def utilization(self) -> float:
        """The share of a GPU that an engine has."""
        return self.config.actor_rollout_ref.rollout.gpu_memory_utilization

    @property
    def settings(self) -> list[str]:
        engines = [*engine_settings(self.engine), f"{UTILIZATION}={self.utilization:g}"]
        return [*engines, *self.sharding.settings]

    @property
    def fits(self) -> bool:
        return self.level != "FAIL"


def search(
    load: Loader, place: Place, policy: ModelShape, machines: Machines, measured: Measured, tell: Callable[[str], None]
) -> Iterator[Planned]:
    """Try layouts, and yield each that was tried. Off-loading costs time: it is tried where a layout does not fit
    without it, or its engines starve.

    `load` makes a run's settings from a layout's; what the user has set is kept.
    """
    tried: set[Sharding] = set()
    need_no_offload: set[Sharding] = set()
    free_size, free_share = _free(load, TENSOR_PARALLEL, (1, 2)), _free(load, UTILIZATION, (0.4, 0.5))
    for family in shardings(placed(load, [], place)):
        for wanted in family:
            # Layouts of which the user's settings leave nothing, or that cannot fit, cost no dry run.
            config = _possible(load, wanted, place)
            if config is None:
                break
            sharding = Sharding.of(config, wanted.given)
            plain = replace(sharding, offload=False, tokens=0)
            if (
                plain in need_no_offload
                or sharding in tried
                or (not wanted.given and least_bytes(config, policy) > place.memory - CUDA_PROCESS)
            ):
                continue
            tried.add(sharding)
            tell(f"dry run: {sharding}")
            roles = measured.roles(config)
            work = RolesWork.of(config, roles, policy, place, machines)
            given = config.actor_rollout_ref.rollout.tensor_model_parallel_size
            sizes = engine_sizes(config, policy) if free_size and not wanted.given else [given]
            plan = partial(_with_engine, work, config, sharding, free_share and place.on_gpu and not wanted.given)
            found = list(_engines(map(plan, sizes)))
            yield from found
            if any(one.level == "ok" for one in found):
                need_no_offload.add(plain)
            if any(one.fits for one in found):
                break


def _engines(by_size: Iterable[Planned]) -> Iterator[Planned]:
    """The plan with the smallest engines that have room for a sequence, and where these fit also with the next larger
    ones; of the run as it is, the one plan.
    """
    before: Planned | None = None
    for found in by_size:
        if not (found.sharding.given or found.at_once.number):
            continue
        yield found
        if before is not None or not found.fits:
            return
        before = found


def _with_engine(work: RolesWork, config: Config, sharding: Sharding, free_share: bool, size: int) -> Planned:
    """The plan with engines of `size` GPUs. Where their share of a GPU is free to choose it is the run's own, or the
    largest that fits if that is faster by more than a plan may be slower for being simpler.
    """
    first = planned(work, with_engine(config, size, config.actor_rollout_ref.rollout.gpu_memory_utilization), sharding)
    if not free_share:
        return first
    share = highest_utilization(first.config, first.phases, work.place)
    if not 0 < share != first.utilization:
        return first
    return best_of([first, planned(work, with_engine(config, size, share), sharding)]) or first


def with_engine(config: Config, size: int, share: float) -> Config:
    """The config with engines of `size` GPUs that have `share` of each."""
    changed = copy.deepcopy(config)
    rollout = changed.actor_rollout_ref.rollout
    rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization = size, share
    return changed


@dataclass(frozen=True)
class RolesWork:
    """Roles that have been run for a layout, and what their work costs, which engines do not change."""

    roles: list[Role]
    policy: ModelShape
    place: Place
    machines: Machines
    floor: Mapping[Phase, Cost]
    costs: Mapping[Phase, Cost]

    @classmethod
    def of(cls, config: Config, roles: list[Role], policy: ModelShape, place: Place, machines: Machines) -> RolesWork:
        floor, costs = (_of_roles(config, roles, place, one) for one in (machines.floor, machines.expected))
        return cls(roles, policy, place, machines, floor, costs)


def planned(work: RolesWork, config: Config, sharding: Sharding) -> Planned:
    """The plan of a layout whose roles have been run."""
    found, of = judged(config, work.roles, work.place, work.policy), expected_trajectories(config, FILLED)
    machines = work.machines
    waiting = NONE if machines.floor is not machines.expected else ASSUMED
    least = sampling_cost(config, work.policy, work.place, machines.floor, of, waiting)
    sampling = sampling_cost(config, work.policy, work.place, machines.expected, of)
    floor = least.seconds + sum(cost.seconds for cost in work.floor.values())
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size  # the user's, if they have set it
    costs = {Phase.SAMPLE: sampling, **work.costs}
    sent = _sent(config, work.roles)
    return Planned(size, sharding, config, found.level, found.verdict, found.at_once, found.phases, floor, costs, sent)


def _of_roles(config: Config, roles: list[Role], place: Place, machine: Machine) -> dict[Phase, Cost]:
    """The costs of all phases in which roles work."""
    # Roles work one after the other on the same GPUs; a critic on GPUs of its own works beside the actor.
    costs: dict[Phase, Cost] = {}
    worked = [_worked(config, role, machine) for role in roles]
    for phase in (Phase.SCORE, Phase.UPDATE, Phase.SYNC):
        of_roles = [by_phase[phase] for by_phase in worked]
        alone = critic_gpus(config)
        costs[phase] = max(of_roles, key=lambda cost: cost.seconds) if alone else sum(of_roles, Cost())

    # New weights are loaded by the engines, and sent to those on other nodes.
    loading = COPIES * roles[0].num_params * 2 / machine.memory_bytes
    costs[Phase.SYNC] += Cost(loading, {COMPUTING: loading})
    costs[Phase.SYNC] += sending_weights(config, 2 * roles[0].num_adapted or roles[0].num_params, place, machine)
    return costs


def placed(load: Loader, settings: Sequence[str], place: Place) -> Config:
    """The config of the run with `settings`, on the devices of `place`. Raises ConfigError."""
    config = located(load(settings), place)
    check_supported(config)
    return config


def _possible(load: Loader, wanted: Sharding, place: Place) -> Config | None:
    """The config of a layout; None where the user's settings, or a script's for another layout, leave no such one."""
    try:
        return placed(load, wanted.settings, place)
    except ConfigError:
        if wanted.sampling_nodes or wanted.given:
            return None
        raise


def _free(load: Loader, key: str, values: tuple[float, float]) -> bool:
    """Whether a plan may set `key`: the user has not. A value that a run refuses would be the plan's, too."""
    try:
        one, other = (value_at(load([f"{key}={value}"]), key) for value in values)
    except ConfigError:  # two GPUs for an engine, say, where nodes have one
        return True
    return bool(one != other)


def engine_settings(size: int) -> list[str]:
    return [f"{TENSOR_PARALLEL}={size}"]


SIMPLER = 0.03  # of a step's time: a layout must gain more than this to be taken before a simpler one


def best_of(found: Sequence[Planned]) -> Planned | None:
    """The simplest layout that fits among those that are no more than 3% slower than the fastest one; one that barely
    fits, or whose engines starve, only if no other does.
    """
    for level in ("ok", "warn"):
        if best := _simplest([one for one in found if one.level == level]):
            return best
    return None


def _simplest(found: Sequence[Planned]) -> Planned | None:
    """The simplest layout: all nodes do the same, small engines, nothing off-loaded, the run's own settings."""

    def complexity(one: Planned) -> tuple[float, ...]:
        sharding = one.sharding
        return sharding.sampling_nodes, one.engine, sharding.offload, not sharding.given, one.utilization, one.seconds

    fastest = min((one.seconds for one in found), default=0.0)
    return min((one for one in found if one.seconds <= (1 + SIMPLER) * fastest), key=complexity, default=None)


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


def scaled(
    load: Loader, first: Planned, place: Place, policy: ModelShape, machines: Machines, measured: Measured
) -> Iterator[Scaled]:
    """The plan on more and more GPUs, beginning with its own; each size takes a dry run."""
    yield Scaled(place.num_devices, first, 1.0)
    per_node = place.per_node or _per_node(place, first.config)
    for number in _numbers(place.num_devices):
        larger = replace(place, num_devices=number, per_node=per_node)
        apart = first.sharding.sampling_nodes * number // place.num_devices
        sharding = replace(first.sharding, sampling_nodes=apart)
        config = placed(load, [*engine_settings(first.engine), *sharding.settings], larger)
        work = RolesWork.of(config, measured.roles(config), policy, larger, machines)
        found = planned(work, with_engine(config, first.engine, first.utilization), sharding)
        yield Scaled(number, found, first.seconds * place.num_devices / (found.seconds * number))


def _per_node(place: Place, config: Config) -> int | None:
    """The GPUs of each node of more places like that of the layout; None where they have to be divided anew."""
    each = config.trainer.n_gpus_per_node
    if config.reward.n_gpus and place.on_gpu:  # on the roles' node if they fit there together, else on one of its own
        return place.num_devices if place.num_devices <= max(NODE, each) else None
    return each if place.num_devices % each == 0 else None


def _numbers(first: int) -> Iterator[int]:
    """The numbers of GPUs to try: multiples of the first up to the last one that is no more than `MOST`."""
    number, last = first * FACTOR, MOST // first * first
    while number < last:
        yield number
        number *= FACTOR
    if last > first:
        yield last
