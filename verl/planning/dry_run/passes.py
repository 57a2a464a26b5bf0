"""The passes of a trained role in a step, over batches as large as the settings allow (every row at its limit, every
token trained), and what their operations do: floating-point operations, bytes that go through the device's memory,
bytes between ranks.

The dry run measures passes on fake devices, `scripts/gpu/engine_step.py` on a GPU. A product's operations are counted
by PyTorch's own formulas; attention is causal, so half of the square.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from verl.config import ActorConfig, Config, CriticConfig
from verl.config.rules.placement import RoleName
from verl.config.rules.predicates import (
    anchor_moves,
    largest_mini_batch,
    needs_ref_log_probs,
    policy_topk,
    scores_in_update,
    trajectories_per_step,
    window_of,
)
from verl.engine.policy_engine import PolicyEngine
from verl.engine.value_engine import ValueEngine
from verl.phases import Phase
from verl.planning.dry_run.torch_private import CollectiveOp, collective_ops, operation_name, sync_ops, tree_leaves
from verl.protocol import TrainBatch

FEW = 2  # tokens of a row that is trained
MICRO_BATCHES = 2
DIFFERENT_IDS = 100


@dataclass(frozen=True)
class LargestPass:
    """A call of an engine. `num_tokens` of its batch over all ranks, None where it takes no batch; `epochs`: how often
    a step does it.
    """

    phase: Phase
    name: str
    run: Callable[[], object]
    num_tokens: int | None = None
    epochs: int = 1


class LargestPasses:
    """The passes of one role of `original`, whose ranks are `num_ranks`.

    config: the same settings with one mini-batch, of what the largest update holds; an engine is built of these.
    share_of_mini_batch: how much of a real mini-batch that is.
    """

    def __init__(self, name: RoleName, original: Config, num_ranks: int) -> None:
        self.original, self.config = original, copy.deepcopy(original)
        self.config.actor_rollout_ref.actor.num_threads = None
        role = self.config.actor_rollout_ref.actor if name == "actor" else self.config.critic
        self.ranks_per_row = role.ulysses_sequence_parallel_size
        self.num_groups = num_ranks // self.ranks_per_row
        self.epochs = role.ppo_epochs
        self.update = self._largest_update(role)

    def first_update(self, engine: PolicyEngine | ValueEngine) -> None:
        """Do a small update, after which there is an optimizer state."""
        few = self._batch([FEW], 1)
        if isinstance(engine, PolicyEngine):
            self._update(engine, few)
        else:
            engine.update(few)

    def of_actor(self, engine: PolicyEngine) -> Iterator[LargestPass]:
        """The passes of the actor, in the order of a step."""
        role = self.config.actor_rollout_ref
        temperature, top_k = role.rollout.temperature, policy_topk(role.actor)
        # No pass before the update where the update itself computes the log-probs, or those of the rollout are used. In
        # the second case the ids of a top-k KL still need the pass.
        if not scores_in_update(self.original) and (top_k or not role.actor.use_rollout_log_probs):
            read = self._batch(self._lengths(role.rollout, "log_prob"), 1)
            yield self._pass(Phase.SCORE, "log-probs", lambda: engine.log_probs(read, temperature, top_k=top_k), read)
        if engine.anchor is not None and needs_ref_log_probs(self.original):
            batch = self._batch(self._lengths(role.ref, "log_prob"), 1)
            yield self._pass(
                Phase.SCORE, "anchor's log-probs", lambda: engine.log_probs(batch, temperature, "anchor"), batch
            )
        yield self._pass(Phase.UPDATE, "update", lambda: self._update(engine, self.update), self.update, self.epochs)
        if anchor_moves(self.config):
            yield LargestPass(Phase.UPDATE, "anchor follows", lambda: engine.follow_anchor(0.9))

    def of_critic(self, engine: ValueEngine) -> Iterator[LargestPass]:
        """The passes of the critic, in the order of a step."""
        read = self._batch(self._lengths(self.config.critic, "forward"), 1)
        yield self._pass(Phase.SCORE, "values", lambda: engine.values(read), read)
        update = self.update
        yield self._pass(Phase.UPDATE, "critic's update", lambda: engine.update(update), update, self.epochs)

    def _pass(
        self, phase: Phase, name: str, run: Callable[[], object], batch: TrainBatch, epochs: int = 1
    ) -> LargestPass:
        return LargestPass(phase, name, run, int(batch.lengths_B.sum()), epochs)

    def _update(self, engine: PolicyEngine, batch: TrainBatch) -> None:
        in_update = scores_in_update(self.original)
        (engine.update_and_score if in_update else engine.update)(for_update(batch, self.original))

    def _largest_update(self, settings: ActorConfig | CriticConfig) -> TrainBatch:
        """A batch of two of a mini-batch's largest micro-batches (or the only one), as the mini-batch of `settings`."""
        rows = largest_mini_batch(trajectories_per_step(self.config), settings.ppo_mini_batch_size)
        lengths = self._lengths(settings, "ppo", rows)
        micro_batches = min(MICRO_BATCHES, -(-rows // (len(lengths) * self.num_groups)))
        batch = self._batch(lengths, micro_batches)
        self.share_of_mini_batch = min(1.0, int(batch.lengths_B.sum()) / (rows * window_of(self.config)))
        settings.ppo_mini_batch_size, settings.ppo_epochs, settings.shuffle = len(batch), 1, False
        return batch

    def _lengths(self, settings: object, prefix: str, rows: int | None = None) -> list[int]:
        """The row lengths of the largest micro-batch of the ranks that share it, when there are `rows` altogether.
        `prefix`: that of the names of the pass' settings.
        """
        rows = trajectories_per_step(self.config) if rows is None else rows
        most_rows = -(-rows // self.num_groups)
        limit = limit_of(settings, prefix).of_ranks(self.ranks_per_row)
        return limit.row_lengths(window_of(self.config), self.num_groups, most_rows)

    def _batch(self, lengths: list[int], micro_batches: int) -> TrainBatch:
        top_k = policy_topk(self.config.actor_rollout_ref.actor)
        return largest_batch(
            lengths, self.num_groups, micro_batches, top_k, self.config.algorithm.norm_adv_by_batch_std
        )


# Batches as large as the settings allow: every row at its limit, every token trained.


@dataclass(frozen=True)
class Limit:
    """The limit of one pass of a rank: `tokens`, or `rows` over all ranks.

    If ranks share rows, a group of them counts as one rank.
    """

    by_tokens: bool
    tokens: int
    rows: int

    def of_ranks(self, number: int) -> Limit:
        """The limit of a group of `number` ranks."""
        return replace(self, tokens=self.tokens * number)

    def row_lengths(self, window: int, num_ranks: int, most_rows: int) -> list[int]:
        """The row lengths of the largest micro-batch of one rank (or group) with at most `most_rows` rows."""
        if not self.by_tokens:
            return [window] * min(max(1, self.rows // num_ranks), most_rows)
        full, rest = divmod(self.tokens, window)
        if full == 0:
            return [window]  # a row that is longer than the budget goes alone
        lengths = [window] * full + ([rest] if rest > 1 else [])
        return lengths[:most_rows]


def limit_of(settings: object, prefix: str) -> Limit:
    """The limit by the settings of a pass, whose names begin with `prefix`."""
    values = vars(settings)
    by_tokens = values.get(f"{prefix}_use_dynamic_bsz", values.get("use_dynamic_bsz"))
    return Limit(bool(by_tokens), values[f"{prefix}_max_token_len_per_gpu"], values[f"{prefix}_micro_batch_size"])


def largest_batch(lengths: list[int], num_ranks: int, micro_batches: int, top_k: int, batch_std: bool) -> TrainBatch:
    """A batch with all columns that any loss reads, for `micro_batches` on each rank."""
    lengths_B = torch.tensor(lengths * (num_ranks * micro_batches), dtype=torch.int64)
    num_tokens, num_rows = int(lengths_B.sum()), len(lengths_B)
    # Only sizes count here, so all columns of numbers share one tensor of zeros.
    zero_T = torch.zeros(num_tokens)
    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns")
    tokens = {name: zero_T for name in names}
    tokens["turn"] = torch.zeros(num_tokens, dtype=torch.int32)
    ids_T = torch.arange(num_tokens) % DIFFERENT_IDS  # one id alone would make a GPU add all of a gradient to one row
    tokens |= {"ids": ids_T, "loss_mask": torch.ones(num_tokens, dtype=torch.bool)}
    if top_k:
        tokens["top_index"] = torch.zeros(num_tokens, top_k, dtype=torch.int32)
    rows = {"reward": torch.zeros(num_rows), "group": torch.arange(num_rows)}
    if batch_std:
        rows["adv_batch_std"] = torch.ones(num_rows)
    return TrainBatch(lengths_B, tokens, rows)


def for_update(batch: TrainBatch, config: Config) -> TrainBatch:
    """The batch without the columns that the actor's update computes itself."""
    found = set() if needs_ref_log_probs(config) else {"ref_log_probs"}
    if scores_in_update(config):
        found |= (
            {"top_index"} if config.actor_rollout_ref.actor.use_rollout_log_probs else {"top_index", "old_log_probs"}
        )
    return replace(batch, tokens={name: value_T for name, value_T in batch.tokens.items() if name not in found})


aten = torch.ops.aten
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # products of [L, L] by [L, D] in attention; the backward makes one again


@dataclass(frozen=True)
class Operation:
    """The work of one kernel: `flops` in the format `dtype`, and `num_bytes` read and written."""

    flops: float
    dtype: torch.dtype
    num_bytes: int


@dataclass
class Work:
    """The operations since the last `restart`. `sent`: bytes of the whole tensor by kind of collective."""

    operations: list[Operation] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def flops(self) -> float:
        return sum(operation.flops for operation in self.operations)

    def lessen(self, kinds: Collection[str], factor: float) -> None:
        """Count only a fraction of the collectives of these kinds, rounded."""
        for counts in (self.sent, self.calls):
            for kind in counts.keys() & set(kinds):
                counts[kind] = round(factor * counts[kind])

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Operation | None:
        """Count one operation of the device; None if it has no kernel of its own."""
        if func in collective_ops:
            self._collective(func, args, kwargs, out)
            return None
        if func.is_view:
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = tensors[0].dtype if tensors else torch.float32
        self.operations.append(Operation(_flops(func, args, kwargs, out), dtype, num_bytes))
        return self.operations[-1]

    def _collective(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        if func not in sync_ops:
            name = collective_kind(str(func))
            self.sent[name] += CollectiveOp.get_comm_tensor_size(func, out, args, kwargs)
            self.calls[name] += 1


def collective_kind(collective: str) -> str:
    """The kind of a collective: all-gather, reduce-scatter, all-reduce, all-to-all, or the operation's own name."""
    plain = collective.replace("_", "").lower()
    kinds = {"allgather": "all-gather", "reducescatter": "reduce-scatter", "allreduce": "all-reduce"}
    kinds["alltoall"] = "all-to-all"
    return next((kind for part, kind in kinds.items() if part in plain), collective)


def workspace_bytes(func: Any, args: Sequence[Any]) -> int:
    """The bytes that the CUDA kernel of an attention's backward takes for itself: for the query's gradient in float32,
    and, with fewer key heads than query heads, for gradients of keys and values for every query head.
    """
    name = operation_name(func)
    if name not in _ATTENTION or not _ATTENTION[name].backward:
        return 0
    query, key = args[1], args[2]
    heads = _ATTENTION[name].heads
    expanded = 0 if query.shape[heads] == key.shape[heads] else 2 * query.numel() * query.element_size()
    return int(query.numel() * 4 + expanded)


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True)
class _Attention:
    """The arguments of an attention operation: the dimension of its heads, and the longest row's length."""

    heads: int
    backward: bool
    longest: Callable[[Sequence[Any]], int]


_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Attention(1, False, lambda args: args[0].shape[2]),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Attention(1, True, lambda args: args[1].shape[2]),
    "torch_attn::_varlen_attn": _Attention(1, False, lambda args: args[5]),
    "torch_attn::_varlen_attn_backward": _Attention(1, True, lambda args: args[8]),
}


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    name = operation_name(func)
    attention = _ATTENTION.get(name)
    if attention is not None:
        query = args[1 if attention.backward else 0]
        products = BACKWARD_PRODUCTS if attention.backward else FORWARD_PRODUCTS
        return products * query.numel() * attention.longest(args)  # 2 per product and value, half of them masked
    # Linear layers on a CPU, for which PyTorch has no formula.
    if name == "mkldnn::_linear_pointwise":
        return 2.0 * out.numel() * args[0].shape[-1]
    # Experts, each with its own rows of the first matrix (or, for a gradient, its own columns); no formula either.
    if name == "aten::_grouped_mm":
        return 2.0 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0.0
    if name in _PRODUCTS:  # without an `out_dtype`, which the formulas do not know
        return float(formula(*(arg for arg in args if isinstance(arg, torch.Tensor)), out_val=out))
    return float(formula(*args, **kwargs, out_val=out))
