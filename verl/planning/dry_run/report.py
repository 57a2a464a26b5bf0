"""The report of a dry run: memory by phase, work, the least time it takes, and the assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import Config
from verl.config.rules.placement import Placement, critic_gpus, devices_of_nodes, placement_of
from verl.config.rules.predicates import trajectories_per_step, window_of
from verl.phases import Phase
from verl.planning.dry_run.device import DeviceUse
from verl.planning.dry_run.machine import Kept, machine_of
from verl.planning.dry_run.place import GIB, Gpu, Place
from verl.planning.dry_run.roles import Pass, Role

FILLED = 0.5  # of the window, by the average trajectory
TERA = 1e12
PROMISED = Kept(products=1.0, memory=1.0, link=1.0, network=1.0, launch_s=0.0)


def report(config: Config, roles: list[Role], phases: list[DeviceUse], place: Place) -> str:
    """The whole report except the verdict."""
    models = []
    for role in roles:
        trained = f" ({role.num_trained / 1e6:.2f} M trained)" if role.num_adapted or role.num_frozen else ""
        models.append(f"{role.name} {role.num_params / 1e9:.2f} B parameters{trained}")
    lines = [", ".join(models), _devices(config, place), "", *_memory(phases, place), ""]
    return "\n".join([*lines, *_work(config, roles, place), "", *_assumed(config)])


def _devices(config: Config, place: Place) -> str:
    """The placement in words: which devices each role has."""
    found = placement_of(config, place.kind)
    critic = ""
    if found.critic:
        critic = f"; the last {found.critic} of each node are the critic's alone, rank 0 of {found.num_critic_ranks}"
    return f"{_others(found, place)}{critic}{_reward_server(config, place)}"


def _reward_server(config: Config, place: Place) -> str:
    """The GPUs of the reward's server in words: those that a node of a role has left where there are enough, since a
    node of its own would do nothing else.
    """
    server, used = config.reward.n_gpus if place.on_gpu else 0, devices_of_nodes(config)
    if not server:
        return ""
    words = f"; besides these, {server} of one node are the reward's server's"
    if place.per_node and server > place.per_node - min(used):
        words += ", and no role uses that node"
    idle = place.num_devices - server - sum(used)
    return words + (f"; {idle} GPUs are left unused" if idle else "")


def _others(found: Placement, place: Place) -> str:
    """The placement of all but a critic that has devices of its own."""
    if not place.on_gpu:
        return f"rank 0 of {found.num_ranks} workers on CPU, {place.memory / GIB:.1f} GiB for each"
    gpus = f"{found.nnodes} x {found.per_node} GPUs of {place.memory / GIB:.1f} GiB"
    engines = f"{found.num_engines} engines of {found.gpus_per_engine}"
    if found.colocated:
        return f"rank 0 of {found.num_ranks}; on {gpus}, {engines} take turns with the ranks"
    if found.sampling_nodes:
        return f"rank 0 of {found.num_ranks}; on {gpus}; {engines} on {found.sampling_nodes} x {found.sampling} more"
    own = f"{found.sampling} of each node sample ({engines}), {found.training} train"
    return f"rank 0 of {found.num_ranks}; of {gpus}, {own}"


def _memory(phases: list[DeviceUse], place: Place) -> Iterator[str]:
    yield f"{'phase':<8} {'GiB':>8} {'left':>8}  of which"
    for phase in phases:
        parts = [f"{name} {part / GIB:.2f}" for name, part in phase.parts.items() if part >= GIB / 200]
        left = f"{(place.memory - phase.total) / GIB:8.2f}"
        name = phase.phase if phase.device == "any" else f"{phase.phase:<8} (a GPU that {phase.device})"
        yield f"{name:<8} {phase.total / GIB:8.2f} {left}  {', '.join(parts)}"


def _work(config: Config, roles: list[Role], place: Place) -> Iterator[str]:
    names = [gpu.name for gpu in place.gpus]
    yield f"{'work of one rank in a step':<28} {'TFLOP':>9} {'GiB sent':>9}" + "".join(
        f" {f's on {name}':>10}" for name in names
    )
    for one, of in ((one, role) for role in roles for one in role.passes):
        flops, sent = one.times * _filled(one) * one.work.flops, one.times * sum(one.work.sent.values())
        seconds = "".join(f" {seconds_of(one, of, gpu):10.1f}" for gpu in place.gpus)
        yield f"{one.name:<28} {flops / TERA:9.1f} {sent / GIB:9.2f}{seconds}"
    if names:
        totals = [least_seconds_of_step(config, roles, gpu) for gpu in place.gpus]
        yield f"{'at least, without sampling':<48}" + "".join(f" {total:10.1f}" for total in totals)


def least_seconds_of_step(config: Config, roles: list[Role], gpu: Gpu) -> float:
    """The least seconds of a step without sampling. A critic on its own GPUs works in parallel with the actor."""
    together = max if critic_gpus(config) else sum
    return sum(
        together([sum(seconds_of(one, role, gpu) for one in role.passes if one.phase is phase) for role in roles])
        for phase in Phase
    )


def seconds_of(one: Pass, role: Role, gpu: Gpu) -> float:
    """The least seconds of a pass in a step, at the data sheet's rates and without waiting. A real run is slower."""
    return one.times * machine_of(gpu, PROMISED).cost(one.work, role.groups, _filled(one)).seconds


def _filled(one: Pass) -> float:
    return FILLED if one.by_tokens else 1.0


def _assumed(config: Config) -> Iterator[str]:
    rows, window = trajectories_per_step(config), window_of(config)
    yield f"memory: rows at their limit of {window} tokens, micro-batches as large as the settings allow; of those,"
    yield "  two of one mini-batch are run, after a first update: further ones take no more"
    yield f"work: {rows} trajectories that fill {FILLED:.0%} of the limit on average; measured on that mini-batch, and"
    yield "  multiplied; seconds are a lower bound: data sheets, no waiting, transfers beside the arithmetic"
