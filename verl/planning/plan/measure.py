"""Dry runs of many layouts in little time, for layers that are all alike.

A model of a few layers (at least the trained ones) is run, and one of a layer more; what that layer adds to memory
and work is added for each of the others. This is exact for parameters, arithmetic and bytes sent. Memory is close: its
peak may be in another operation when there are more layers. So the planner runs the layout that it recommends once more
with all layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from verl.config import Config
from verl.config.rules.predicates import has_critic, has_exact_kl, needs_ref_log_probs, scores_in_update
from verl.config.sections.model import ModelConfig
from verl.engine.device.runtime import resolve_precision
from verl.engine.files.loading import CPU, model_shape
from verl.engine.hf_model import HfModel
from verl.engine.model import CausalLm, TokenClassifier
from verl.phases import Phase
from verl.planning.dry_run.memory import Peak
from verl.planning.dry_run.passes import Operation, Work
from verl.planning.dry_run.roles import Pass, Role, run_roles
from verl.pretrained import load_model_config

FEW = 3  # layers of the smaller model: the first and the last are special to FSDP's prefetching


class Measured:
    """The roles of layouts that differ in what the trained roles do. `exact`: all roles were run with all layers."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._updates: dict[str, list[Pass]] = {}
        self._num_params: list[int] = []  # of the models with all layers
        self.exact = True

    def roles(self, config: Config) -> list[Role]:
        """The roles of `config`. Off-loading changes nothing in an update, in which all that it reads is on the device:
        layouts that differ in that alone share one.
        """
        key = _of_update(config)
        phases = [phase for phase in Phase if phase is not Phase.UPDATE or key not in self._updates]
        roles = self._run(config, phases)
        if key not in self._updates:
            self._updates[key] = [one for role in roles for one in role.passes if one.phase is Phase.UPDATE]
            return roles
        # The critic has one pass of an update, which is the last.
        update = self._updates[key]
        shared = [update] if len(roles) == 1 else [update[:-1], update[-1:]]
        return [replace(role, passes=[*role.passes, *own]) for role, own in zip(roles, shared, strict=True)]

    def _run(self, config: Config, phases: Collection[Phase]) -> list[Role]:
        # The number of layers of each role's model; None where its config.json does not say it by the usual name.
        models = _models(config)
        configs = [load_model_config(one.path, one.trust_remote_code, one.override_config) for one in models]
        layers: list[int | None] = [getattr(one, "num_hidden_layers", None) for one in configs]
        # Where only the last layers are trained, the layers that are added are frozen ones.
        size = max(FEW, *(one.trained_layers or 0 for one in models))
        if any(number is None or number <= size + 2 for number in layers):
            return run_roles(config, self._kind, phases)
        settled = self._settled(config)
        few, more = (run_roles(_with_layers(settled, number), self._kind, phases) for number in (size, size + 1))
        self.exact = False
        return [
            with_layers(one, other, (number or 0) - size) for one, other, number in zip(few, more, layers, strict=True)
        ]

    def _settled(self, config: Config) -> Config:
        """The config with the number formats that the models have with all layers: a CPU chooses by their size."""
        if self._kind != "cpu":
            return config
        settled = copy.deepcopy(config)
        models = _models(settled)
        if not self._num_params:  # the layouts of a plan have the same models
            kinds: tuple[type[HfModel], ...] = (CausalLm, TokenClassifier)
            shapes = (model_shape(kind.of(one.path, one, CPU)) for kind, one in zip(kinds, models, strict=False))
            self._num_params = [shape.num_params for shape in shapes]
        trained = (settled.actor_rollout_ref.actor.fsdp_config, settled.critic.model.fsdp_config)
        for fsdp, num_params in zip(trained, self._num_params, strict=False):
            mixed = fsdp.mixed_precision
            chosen = resolve_precision(CPU, mixed.param_dtype, mixed.reduce_dtype, num_params).param_dtype
            mixed.param_dtype = "bfloat16" if chosen is torch.bfloat16 else "float32"
        return settled


def with_layers(few: Role, more: Role, number: int) -> Role:
    """The role with `number` layers more than `few` has, by what the one layer adds that `more` has more."""

    def grow(one: int, other: int) -> int:
        return one + number * (other - one)

    def grow_peak(one: Peak, other: Peak) -> Peak:
        # What the allocator holds besides is the rest of the largest segments, which are those of embedding and head.
        allocated = grow(one.allocated, other.allocated)
        return Peak(allocated, allocated + other.held - other.allocated)

    def grow_counts(one: Counter[str], other: Counter[str]) -> Counter[str]:
        return Counter({kind: grow(one[kind], other[kind]) for kind in one | other})

    passes = []
    for one, other in zip(few.passes, more.passes, strict=True):
        operations = _grown(one.work.operations, other.work.operations, number)
        sent, calls = grow_counts(one.work.sent, other.work.sent), grow_counts(one.work.calls, other.work.calls)
        passes.append(replace(one, peak=grow_peak(one.peak, other.peak), work=Work(operations, sent, calls)))
    return replace(
        few,
        num_params=grow(few.num_params, more.num_params),
        num_adapted=grow(few.num_adapted, more.num_adapted),
        num_frozen=grow(few.num_frozen, more.num_frozen),
        idle=grow_peak(few.idle, more.idle),
        passes=passes,
    )


def _grown(few: Sequence[Operation], more: Sequence[Operation], number: int) -> list[Operation]:
    """The operations of `few`, with the layer that `more` has besides `number` times.

    An operation on the tensors of all layers, such as the optimizer's, is in both with other sizes: it grows.
    """
    added, gone = list((Counter(more) - Counter(few)).elements()), list((Counter(few) - Counter(more)).elements())
    found = list((Counter(few) & Counter(more)).elements())
    # What is in `few` alone is paired with the closest operation of `more`: the same one, with larger tensors.
    for one in gone:
        alike = [other for other in added if other.dtype == one.dtype and other.num_bytes >= one.num_bytes]
        if not alike:
            found.append(one)
            continue
        other = min(alike, key=lambda other: other.num_bytes)
        added.remove(other)
        flops = one.flops + number * (other.flops - one.flops)
        found.append(Operation(flops, one.dtype, one.num_bytes + number * (other.num_bytes - one.num_bytes)))
    return found + number * added


def _models(config: Config) -> list[ModelConfig]:
    return [config.actor_rollout_ref.model, *([config.critic.model] if has_critic(config) else [])]


def _with_layers(config: Config, number: int) -> Config:
    changed = copy.deepcopy(config)
    for model in (changed.actor_rollout_ref.model, changed.critic.model):
        model.override_config = {**model.override_config, "num_hidden_layers": number}
    return changed


def _of_update(config: Config) -> str:
    """What an update depends on, as text."""
    plain = copy.deepcopy(config)
    role = plain.actor_rollout_ref
    role.rollout.tensor_model_parallel_size, role.rollout.gpu_memory_utilization = 1, 0.5
    # The anchor is on the device in an update that reads it; in any other it stays where it is.
    if has_exact_kl(role.actor) or not needs_ref_log_probs(config):
        role.ref.fsdp_config.param_offload = False
    for fsdp in (role.actor.fsdp_config, plain.critic.model.fsdp_config):
        fsdp.param_offload = fsdp.grad_offload = fsdp.optimizer_offload = False
    return f"{needs_ref_log_probs(config)} {scores_in_update(config)} {plain}"
