"""Memory of one device by holder in each phase of a step: roles and engine share it, or have their own devices
(`trainer.layout=split`, `critic.n_gpus_per_node`). An engine's key-value cache has what its weights leave.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch

from verl.config import Config
from verl.config.rules.placement import ROLLOUT, TENSOR_PARALLEL, critic_gpus, placement_of
from verl.config.rules.predicates import trajectories_per_step, window_of
from verl.engine.device.runtime import resolve_engine_dtype
from verl.engine.files.loading import ModelShape
from verl.phases import RESIDENT, Part, Phase
from verl.planning.dry_run.memory import Peak
from verl.planning.dry_run.place import GIB, Place
from verl.planning.dry_run.roles import Pass, Role

CUDA_PROCESS = GIB  # of each process, assumed: CUDA's context, NCCL's buffers, cuBLAS' workspace
CUDA_GRAPHS = GIB  # of an engine that captured some, assumed; vLLM keeps them while it sleeps
SPARE = 0.05  # of a device, that should be left
MOST_OF_A_GPU = 0.9  # that an engine is given: vLLM's own default
UTILIZATION = f"{ROLLOUT}.gpu_memory_utilization"
CPU_PROCESS, CPU_ENGINE = GIB // 2, 5 * GIB // 4  # resident before anything is loaded, as seen: Python and libraries
# What glibc keeps of each byte that a pass takes and frees, as the growth of three processes was; twice as many blocks
# come and go with gradient checkpointing.
FREED, FREED_CHECKPOINTED = 0.4, 1.1


@dataclass
class DeviceUse:
    """The memory of one device: bytes by holder, at the peak of the phase. `device` says which one: "any" if all are
    alike, else what it does.
    """

    phase: Phase
    device: str = "any"
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def device_phases(config: Config, roles: list[Role], place: Place) -> list[DeviceUse]:
    """The memory of devices by phase: of the four phases on a GPU; on CPU, where engines are separate processes, of
    those in which roles work; on the critic's own GPUs, of those in which it works.
    """
    if not critic_gpus(config):
        return _of_actor(config, roles, place, "any" if config.trainer.layout == "colocated" else "trains")
    actor, critic = roles
    alone = [_alone(phase, config, actor, critic, place) for phase in (Phase.SCORE, Phase.UPDATE)]
    return [*_of_actor(config, [actor], place, "trains the actor"), *alone]


def _of_actor(config: Config, roles: list[Role], place: Place, device: str) -> list[DeviceUse]:
    """The memory of devices of the actor, which is the first of `roles`."""
    if config.trainer.layout == "split":
        sampling = DeviceUse(Phase.SAMPLE, "samples", {"engine": _share(config, place)})
        return [sampling, *(_training(phase, roles, place, device) for phase in Phase if phase != "sample")]
    named = [phase for phase in Phase if place.on_gpu or phase is not Phase.SAMPLE]
    return [_shared(phase, config, roles, place, device) for phase in named]


def _alone(name: Phase, config: Config, actor: Role, critic: Role, place: Place) -> DeviceUse:
    """The memory of a device that is the critic's alone."""
    phase = _training(name, [critic], place, "trains the critic")
    if not place.on_gpu:
        phase.parts |= _on_cpu(config, [critic], phase, actor)
    return phase


def _shared(name: Phase, config: Config, roles: list[Role], place: Place, device: str) -> DeviceUse:
    """The memory of a device that is shared with an engine."""
    phase = _training(name, roles, place, device)
    if not place.on_gpu:
        phase.parts |= _on_cpu(config, roles, phase, roles[0])
        return phase
    phase.parts["engine"] = engine = _engine(name, config, roles[0], place)
    if not engine:
        phase.parts["processes"] += CUDA_PROCESS  # one that is awake counts its own
    if _sleeps(name, config) and not config.actor_rollout_ref.rollout.enforce_eager:
        phase.parts["CUDA graphs"] = CUDA_GRAPHS
    return phase


def _training(name: Phase, roles: list[Role], place: Place, device: str) -> DeviceUse:
    """The memory of all except the engine: of the role that works, and of those at rest."""

    def taken(pair: tuple[Role, Pass]) -> float:
        return size(pair[1].peak, place) - size(pair[0].idle, place)

    # The worst pass is the one that adds most to its role at rest, because all other roles are at rest then.
    phase = DeviceUse(name, device)
    found = [(role, one) for role in roles for one in role.passes if one.phase is name]
    worst = max(found, key=taken, default=None)
    for role in roles:
        if worst is not None and role is worst[0]:
            phase.parts[f"{role.name}: {worst[1].name}"] = size(worst[1].peak, place)
        else:
            phase.parts[f"{role.name} at rest"] = size(role.idle, place)
    if place.on_gpu:
        phase.parts["processes"] = CUDA_PROCESS * len(roles)
    return phase


def _engine(phase: Phase, config: Config, actor: Role, place: Place) -> float:
    """Bytes of a GPU's engine: its share while it samples, its weights while it gets new ones, else nothing."""
    if not _sleeps(phase, config):
        return _share(config, place)
    if Part.ENGINE_WEIGHTS not in RESIDENT[phase]:
        return 0.0
    return _weights(config, actor, "cuda") / config.actor_rollout_ref.rollout.tensor_model_parallel_size


def _sleeps(phase: Phase, config: Config) -> bool:
    """Whether a GPU's engine has released at least its cache."""
    return config.actor_rollout_ref.rollout.free_cache_engine and Part.KV_CACHE not in RESIDENT[phase]


def _share(config: Config, place: Place) -> float:
    return config.actor_rollout_ref.rollout.gpu_memory_utilization * place.memory


def _on_cpu(config: Config, roles: list[Role], phase: DeviceUse, actor: Role) -> dict[str, float]:
    """The memory on CPU besides tensors, and a worker's part of the engines, which always run."""
    rollout, each = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    engines = rollout.num_engines / each
    taken = sum(phase.parts.values()) - sum(role.idle.allocated for role in roles)
    critic_works = any(part.startswith("critic: ") for part in phase.parts)
    model = config.critic.model if critic_works else config.actor_rollout_ref.model
    checkpoints = phase.phase is Phase.UPDATE and model.enable_gradient_checkpointing
    return {
        "engines": engines * (_weights(config, actor, "cpu") + rollout.kv_cache_gib * GIB),
        "freed blocks": taken * (FREED_CHECKPOINTED if checkpoints else FREED),
        "processes": CPU_PROCESS * len(roles) + CPU_ENGINE * engines,
    }


def _weights(config: Config, actor: Role, kind: str) -> float:
    """Bytes of an engine's weights."""
    return engine_width(config, actor.num_params, kind) * actor.num_params


def engine_width(config: Config, num_params: int, kind: str) -> int:
    """Bytes of a number in an engine for a model of so many parameters, on that kind of device."""
    return resolve_engine_dtype(torch.device(kind), config.actor_rollout_ref.rollout.dtype, num_params).itemsize


def size(peak: Peak, place: Place) -> float:
    """Device memory for a peak; on a GPU in the allocator's segments."""
    return peak.held if place.on_gpu else peak.allocated


LARGEST_WARM_UP = 4 * GIB  # what vLLM needs beside weights and cache, for its largest iteration
# Of a sequence and an entry of the vocabulary: the head's output, the same in float32, and its log-probs.
LOGIT_BYTES = 2 + 4 + 4
FEWEST_AT_ONCE = 4  # an engine that holds less than this fraction of its trajectories at once is said to starve


def kv_cache_tokens(config: Config, policy: ModelShape, place: Place) -> int:
    """The tokens that one engine's cache holds; 0 or less: its weights do not fit into its share of a GPU.

    Each GPU of an engine has an equal part of the layers' key heads, or one head where there are fewer heads than GPUs:
    vLLM then keeps a head on several GPUs.
    """
    rollout = config.actor_rollout_ref.rollout
    width = engine_width(config, policy.num_params, place.kind)
    per_token = 2 * policy.num_layers * width  # bytes, for each number of a layer's keys
    if not place.on_gpu:
        return int(rollout.kv_cache_gib * GIB // (per_token * policy.key_width))
    ranks = rollout.tensor_model_parallel_size
    room = rollout.gpu_memory_utilization * place.memory - width * policy.num_params / ranks
    keys = max(policy.key_width / ranks, policy.key_width / (policy.num_key_heads or ranks))
    return int((room - engine_reserve(config, policy, width)) // (per_token * keys))


def engine_reserve(config: Config, policy: ModelShape, width: int) -> float:
    """Bytes of an engine's share of a GPU that are neither weights nor cache, as vLLM keeps them free: its process, its
    CUDA graphs, and the larger of its largest iteration and the logits of as many sequences as it continues at once.
    """
    rollout = config.actor_rollout_ref.rollout
    tokens, ranks = rollout.max_num_batched_tokens, rollout.tensor_model_parallel_size
    iteration = width * tokens * (2 * policy.mlp // ranks + 4 * policy.hidden)
    logits = LOGIT_BYTES * rollout.max_num_seqs * policy.num_embeddings + width * tokens * policy.hidden
    graphs = 0 if rollout.enforce_eager else CUDA_GRAPHS
    return CUDA_PROCESS + graphs + max(min(iteration, LARGEST_WARM_UP), logits)


@dataclass(frozen=True)
class AtOnce:
    """How many trajectories of `window` tokens an engine holds at once, of the `share` that it samples in a step."""

    tokens: int
    window: int
    limit: int  # by the settings
    share: int

    @property
    def number(self) -> int:
        return min(max(self.tokens, 0) // self.window, self.limit, self.share)

    @property
    def starves(self) -> bool:
        """Whether less than a quarter of the engine's trajectories are sampled at once."""
        return self.number * FEWEST_AT_ONCE < self.share

    def __str__(self) -> str:
        return (
            f"an engine has room for {max(self.tokens, 0)} tokens, a sequence has at most {self.window}: {self.number} "
            f"trajectories of that length at once, of the {self.share} that it samples in a step"
        )


def sampled_at_once(config: Config, policy: ModelShape, place: Place) -> AtOnce:
    """How many trajectories one engine samples at once. The settings limit it too: `max_num_seqs`, `max_concurrent`."""
    rollout, trajectories = config.actor_rollout_ref.rollout, trajectories_per_step(config)
    engines = placement_of(config, place.kind).num_engines if place.on_gpu else rollout.num_engines
    limit = min(rollout.max_num_seqs, rollout.max_concurrent or rollout.max_num_seqs)
    tokens = kv_cache_tokens(config, policy, place)
    return AtOnce(tokens, window_of(config), limit, math.ceil(trajectories / engines))


def room_for_sequences(config: Config, policy: ModelShape, place: Place) -> tuple[bool, str]:
    """Whether the longest sequence has room, and a message, which says what to change if it has none."""
    found = sampled_at_once(config, policy, place)
    if found.tokens >= found.window:
        return True, str(found)
    if not place.on_gpu:
        return False, f"{found}; raise {ROLLOUT}.kv_cache_gib"
    todo = f"raise {UTILIZATION}"
    enough = _enough_ranks(config, policy, place)
    return False, f"{found}; set {TENSOR_PARALLEL}={enough}, or {todo}" if enough else f"{found}; {todo}"


def more_at_once(config: Config, policy: ModelShape, phases: list[DeviceUse], place: Place) -> str:
    """What to change so that an engine that starves samples more trajectories at once."""
    rollout, found = config.actor_rollout_ref.rollout, sampled_at_once(config, policy, place)
    if found.number == found.limit:  # the cache has room for more
        limit = "max_num_seqs" if found.limit == rollout.max_num_seqs else "max_concurrent"
        return f"raise {ROLLOUT}.{limit}={found.limit}"
    if not place.on_gpu:
        return f"raise {ROLLOUT}.kv_cache_gib"
    # A larger share of a GPU, which an engine that does not sleep keeps in all phases.
    highest = highest_utilization(config, phases, place)
    tried = copy.deepcopy(config)
    tried.actor_rollout_ref.rollout.gpu_memory_utilization = highest
    if highest > rollout.gpu_memory_utilization:
        number = sampled_at_once(tried, policy, place).number
        return (
            f"{UTILIZATION}={highest:g} fits, and has room for {number}; the *_offload keys or a larger engine for more"
        )
    sleep = "" if rollout.free_cache_engine else f"{ROLLOUT}.free_cache_engine=true, "
    return f"set {sleep}the *_offload keys, or raise {TENSOR_PARALLEL}"


def highest_utilization(config: Config, phases: list[DeviceUse], place: Place) -> float:
    """The largest share of a GPU that an engine may have, in steps of 0.05, by what others have there while it has its
    share: as it samples, and in all other phases if it does not sleep.
    """
    share = _share(config, place)
    others = max(phase.total - share for phase in phases if phase.parts.get("engine") == share)
    return min(MOST_OF_A_GPU, math.floor(20 * (1 - SPARE - others / place.memory)) / 20)


def _enough_ranks(config: Config, policy: ModelShape, place: Place) -> int | None:
    """The fewest GPUs of an engine that give a sequence room; None if no number does."""
    tried, sampling = copy.deepcopy(config), placement_of(config, "cuda").sampling
    for ranks in (ranks for ranks in range(1, sampling + 1) if sampling % ranks == 0):
        tried.actor_rollout_ref.rollout.tensor_model_parallel_size = ranks
        if kv_cache_tokens(tried, policy, place) >= window_of(config):
            return ranks
    return None
