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
_PREPARE = "verl.trainer.estimates.Estimator.prepare"
_UPDATES = "verl.trainer.updates.Updates"
_HEALTH = "verl.trainer.health"
_OBJECTIVE = "verl.engine.policy_objective.PolicyObjective"
_KL = "verl.engine.kl_objective"
_STORED = "verl.trainer.stored_values.token_values"
_SCORES = "verl.trainer.policy_scores.PolicyScores.of"
_INPUT = "verl.engine.batching"
_METRICS = "verl.trainer.metrics.batch_metrics"

COLUMNS: Mapping[Kind, Mapping[str, Column]] = {
    "tokens": {
        "ids": Column("int64", "token ids", _BATCH, (f"{_INPUT}.model_input",)),
        "loss_mask": Column(
            "bool", "the policy's tokens, or those that a loss covers", _BATCH, (f"{_INPUT}.model_input",)
        ),
        "rollout_log_probs": Column(
            "float32", "the sampler's log-probs, nats", _BATCH, (_PREPARE, f"{_HEALTH}.sampler_mismatch")
        ),
        "labels": Column("int64", "ids whose log-probs are taken, where not `ids`", "", (f"{_INPUT}.labels_of",)),
        "old_log_probs": Column(
            "float32",
            "log-probs under the policy before the step, nats",
            _PREPARE,
            (f"{_KL}.old_log_probs", _SCORES),
        ),
        "ref_log_probs": Column("float32", "log-probs under the anchor, nats", _PREPARE, (f"{_KL}.SampledTerm",)),
        "entropy": Column("float32", "of the policy before the step, nats", _PREPARE, (_SCORES,)),
        "top_index": Column(
            "int32",
            "[T, k] the policy's most likely ids before the step; each rank keeps those of its rows",
            "verl.engine.policy_engine.PolicyEngine.log_probs",
            (f"{_KL}.TopkTerm",),
            ndim=2,
        ),
        "values": Column(
            "float32", "the critic's values before the step", _PREPARE, ("verl.engine.value_engine.ValueEngine.loss",)
        ),
        "kl": Column(
            "float32", "to the anchor, nats: in the reward, or in the loss before its weight", _PREPARE, (_STORED,)
        ),
        "rewards": Column("float32", "token rewards, less the KL in the reward", _PREPARE, (_METRICS,)),
        "advantages": Column(
            "float32", "what a policy token is worth", _PREPARE, (_OBJECTIVE, f"{_HEALTH}.zero_advantages", _STORED)
        ),
        "returns": Column(
            "float32", "the critic's targets", _PREPARE, ("verl.engine.value_engine.ValueEngine.loss", _METRICS)
        ),
        "correction": Column(
            "float32", "weight of the policy loss, for the sampler's mismatch", _PREPARE, (_OBJECTIVE,)
        ),
        "keep": Column("bool", "tokens that are not rejected", _PREPARE, ("verl.trainer.estimates.for_losses",)),
        "log_probs": Column(
            "float32", "as `old_log_probs`, of the update's own pass", f"{_UPDATES}.run", (f"{_UPDATES}.scores",)
        ),
        "loss_weight": Column(
            "float32",
            "weight of each token in the loss of a mini-batch",
            "verl.engine.learner.Learner.accumulate",
            ("verl.engine.learner.Learner.accumulate",),
        ),
    },
    "rows": {
        "reward": Column("float32", "of the trajectory", _BATCH, ("verl.trainer.estimates.token_rewards", _METRICS)),
        "group": Column("int64", "number of the prompt, 0.. in order of first use", _BATCH, (_PREPARE,)),
        "baseline": Column(
            "float32", "reward of the greedy answer", "verl.trainer.collection.Collector.collect", (_PREPARE,)
        ),
        "adv_batch_std": Column("float32", "deviation that the advantages were divided by", _PREPARE, (_OBJECTIVE,)),
        "row": Column(
            "int64",
            "number of the row in the step's batch",
            "verl.engine.policy_engine.PolicyEngine.update",
            ("verl.engine.policy_engine.PolicyEngine.update",),
        ),
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
