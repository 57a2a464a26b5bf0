"""The named columns of a `TrainBatch`: what each one is, who writes it, and who reads it.

Of each token (`tokens`) or of each row (`rows`), of all rows of a batch. A column is checked when it is set: its name,
its number type and its length. A new one is a line here. Imports no torch, as `verl.protocol` does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["tokens", "rows"]


class Column(NamedTuple):
    """`dtype` as torch calls it; `ndim` dimensions, the first of which are the tokens [T] or the rows [B].

    writer: the function that sets it. readers: those that read it, where it is there.
    """

    dtype: str
    meaning: str
    writer: str
    readers: tuple[str, ...] = ()
    ndim: int = 1


_BATCH = "verl.protocol.TrainBatch.from_trajectories"
_MODEL = "verl.engine.batching.model_input"
_COLLECT = "verl.trainer.sampling.collection.Collector.collect"
_PREPARE = "verl.trainer.estimates.Estimator.prepare"
_UPDATES, _SCORES = "verl.trainer.updates.Updates.run", "verl.trainer.updates.Updates.scores"
_ENGINE, _LEARNER = "verl.engine.policy_engine.PolicyEngine", "verl.engine.learner.Learner.accumulate"
_LOSS, _KL = "verl.engine.policy_objective.PolicyObjective", "verl.engine.policy_objective"
_CRITIC = "verl.engine.value_engine.ValueEngine.loss"
_MISMATCH = "verl.trainer.metrics.health.sampler_mismatch"
_METRICS, _STORED = "verl.trainer.metrics.batch.batch_metrics", "verl.trainer.stored_values.token_values"

COLUMNS: Mapping[Kind, Mapping[str, Column]] = {
    "tokens": {
        "ids": Column("int64", "token ids", _BATCH, (_MODEL,)),
        "loss_mask": Column("bool", "the policy's tokens, or those of a loss", _BATCH, (_MODEL,)),
        "rollout_log_probs": Column(
            "float32", "the sampler's log-probs, nats", _BATCH, (_PREPARE, _MISMATCH, f"{_KL}.build_kl")
        ),
        "turn": Column(
            "int32",
            "number of the rollout's turn, 0.. over those with tokens; 0 at tokens that the policy did not write",
            _BATCH,
            (_PREPARE, _LOSS, _MISMATCH),
        ),
        "labels": Column("int64", "ids whose log-probs are taken, where not `ids`", "", (_MODEL,)),
        "old_log_probs": Column(
            "float32", "under the policy before the step, nats", _PREPARE, (f"{_KL}.old_log_probs", _SCORES)
        ),
        "ref_log_probs": Column("float32", "under the anchor, nats", _PREPARE, (f"{_KL}.SampledTerm",)),
        "entropy": Column("float32", "of the policy before the step, nats", _PREPARE, (_SCORES,)),
        "top_index": Column(  # which each rank keeps of its rows
            "int32", "[T, k] the likeliest ids before the step", f"{_ENGINE}.log_probs", (f"{_KL}.TopkTerm",), ndim=2
        ),
        "values": Column("float32", "the critic's before the step", _PREPARE, (_CRITIC, _METRICS)),
        "kl": Column("float32", "to the anchor, nats, before its weight", _PREPARE, (_STORED,)),
        "turn_rewards": Column(
            "float32", "of a turn by itself, at its last token", _BATCH, ("verl.trainer.estimates.token_rewards",)
        ),
        "rewards": Column("float32", "of a token, less the KL in the reward", _PREPARE, (_METRICS,)),
        "advantages": Column("float32", "what a policy token is worth", _PREPARE, (_LOSS, _METRICS, _STORED)),
        "returns": Column("float32", "the critic's targets", _PREPARE, (_CRITIC, _METRICS)),
        "correction": Column("float32", "weight of the policy loss, for the mismatch", _PREPARE, (_LOSS,)),
        "keep": Column("bool", "tokens that are not rejected", _PREPARE, ("verl.trainer.estimates.for_losses",)),
        "log_probs": Column("float32", "of a pass of the trainer, where `old_log_probs` is not", _UPDATES, (_SCORES,)),
        "loss_weight": Column("float32", "of a token in the loss of a mini-batch", _LEARNER, (_LEARNER,)),
    },
    "rows": {
        "reward": Column("float32", "of the rollout", _BATCH, (_PREPARE, _METRICS)),
        "rollout": Column(
            "int64", "which one the row is a sequence of", _BATCH, (_PREPARE, _LOSS, f"{_ENGINE}.update")
        ),
        "group": Column("int64", "number of the prompt, 0.. in order of first use", _BATCH, (_PREPARE,)),
        "baseline": Column("float32", "reward of the greedy answer", _COLLECT, (_PREPARE,)),
        "adv_batch_std": Column("float32", "what the advantages were divided by", _PREPARE, (_LOSS,)),
        "row": Column("int64", "number in the batch of the step", f"{_ENGINE}.update", (f"{_ENGINE}.update",)),
    },
}


class Columns(dict[str, Any]):
    """Tensors by name, each of `length` tokens or rows. Raises ValueError for one that is not as `COLUMNS` says."""

    def __init__(self, kind: Kind, length: int, columns: Mapping[str, Any]) -> None:
        super().__init__()
        self.kind, self.length = kind, length
        self |= columns

    def __setitem__(self, name: str, column: Any) -> None:
        known = COLUMNS[self.kind].get(name)
        if known is None:
            raise ValueError(
                f"{self.kind}['{name}'] is no column of a batch, those are {', '.join(COLUMNS[self.kind])}; a new one "
                "needs a line in verl/columns.py"
            )
        dtype = str(column.dtype).removeprefix("torch.")
        if dtype != known.dtype or column.ndim != known.ndim or column.shape[0] != self.length:
            raise ValueError(
                f"{self.kind}['{name}'] is {dtype} {list(column.shape)}; it must be {known.dtype} with {known.ndim} "
                f"dimensions, the first of {self.length} {self.kind}"
            )
        super().__setitem__(name, column)

    def __ior__(self, others: Any) -> Columns:  # type: ignore[override, misc]
        self.update(others)
        return self

    def update(self, *others: Any, **named: Any) -> None:
        for name, column in dict(*others, **named).items():
            self[name] = column

    def setdefault(self, name: str, column: Any = None) -> Any:
        if name not in self:
            self[name] = column
        return self[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self.kind, self.length, dict(self))
