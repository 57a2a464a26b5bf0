"""The actor with its anchor: log-probs, the PPO update, following, saving. One object per rank, no Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from verl.algorithms import anchor as anchor_rule
from verl.algorithms.kl import EXACT_KL
from verl.config import Config, RefConfig, RolloutConfig
from verl.config.model import FrozenFsdpConfig, FsdpConfig
from verl.engine.batching import Budget, ModelInput, flat_positions, model_input, plan, split_rows
from verl.engine.device import set_threads
from verl.engine.head import AnchorView
from verl.engine.learner import Learner
from verl.engine.loading import load_sharded
from verl.engine.model import CausalModel, can_pack
from verl.engine.optimizer import Schedule, build_adamw, set_lr
from verl.engine.policy_objective import PolicyObjective
from verl.engine.saving import save_model
from verl.engine.sharding import iter_full_parameters, local_shards, reshard, whole
from verl.errors import NumericalError
from verl.protocol import TrainBatch

logger = logging.getLogger(__name__)

Which = Literal["policy", "anchor"]


class RankValues(NamedTuple):
    """One rank's answer: row numbers, and [T] float32 CPU values of those rows one after the other (0 where unmasked).

    `batching.merge_rows` puts the answers of all ranks together.
    """

    rows: list[int]
    log_prob_T: torch.Tensor
    entropy_T: torch.Tensor


class PolicyEngine:
    """The trained policy, sharded over all ranks of the process group, and optionally its anchor beside it.

    Each rank gets the same whole batch in every call and works on its own rows. All methods are collective: every
    rank calls them in the same order.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        total_training_steps: int,
        with_anchor: bool,
        anchor_path: str | None = None,
    ) -> None:
        """Load `model.path` (and the anchor from `anchor_path`, by default the same) and shard both.

        `total_training_steps` is the length of the learning-rate schedule unless optim.total_training_steps says
        otherwise. The process group must exist. Raises ConfigError.
        """
        self.config = config
        self.device = device
        self.role = config.actor_rollout_ref
        self.step = 0  # RL steps done
        actor = self.role.actor
        set_threads(actor.num_threads)
        self.policy = self._load(self.role.model.path, actor.fsdp_config, trained=True)
        self.anchor: CausalModel | None = None
        if with_anchor:
            path = anchor_path or self.role.model.path
            self.anchor = self._load(path, self.role.ref.fsdp_config, trained=False)
        self.packed = self.role.model.use_remove_padding and can_pack(self.policy.model)
        optim = actor.optim
        num_steps = total_training_steps if optim.total_training_steps < 0 else optim.total_training_steps
        self.schedule = Schedule.from_config(optim, num_steps)
        optimizer = build_adamw(self.policy.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay)
        budget = _budget(actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size)
        failure_dir = Path(config.trainer.default_local_dir) / "failures"
        self.learner = Learner(self.policy, optimizer, device, budget, actor.grad_clip, failure_dir, self.packed)
        look = self._look if self.anchor is not None else None
        self.objective = PolicyObjective(actor, self.policy, self.role.rollout.temperature, look)

    def rows_of_rank(self, batch: TrainBatch) -> list[int]:
        """The rows whose log-probs this rank computes."""
        return split_rows(batch.lengths_B, dist.get_world_size())[dist.get_rank()]

    @torch.no_grad()
    def log_probs(self, batch: TrainBatch, temperature: float, of: Which = "policy") -> RankValues:
        """Log-prob and entropy of the loss mask's tokens in this rank's rows, with logits over `temperature`.

        Raises NumericalError when one of them is not finite.
        """
        model = self._model(of)
        model.eval()
        settings: RolloutConfig | RefConfig = self.role.rollout if of == "policy" else self.role.ref
        budget = _budget(
            settings.log_prob_use_dynamic_bsz,
            settings.log_prob_max_token_len_per_gpu,
            settings.log_prob_micro_batch_size,
        )
        token_values = {name: torch.zeros(len(batch.tokens["ids"])) for name in ("log_prob", "entropy")}
        for rows in plan(batch.lengths_B, range(len(batch)), dist.get_world_size(), dist.get_rank(), budget):
            micro_batch = batch.select(rows)
            inputs = model_input(micro_batch, self.device, self.packed)
            stats = model(inputs, temperature)
            token_N = flat_positions(batch.lengths_B, rows)[inputs.token_N]
            token_values["log_prob"][token_N] = stats.log_prob_N.cpu()
            token_values["entropy"][token_N] = stats.entropy_N.cpu()
        reshard(model)
        if not all(value_T.isfinite().all() for value_T in token_values.values()):
            raise NumericalError(f"step {self.step}: the {of}'s log-probs are not finite; its weights have diverged")
        own = self.rows_of_rank(batch)
        values = TrainBatch(batch.lengths_B, token_values).select(own).tokens
        return RankValues(own, values["log_prob"], values["entropy"])

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One RL step: `ppo_epochs` passes over mini-batches of `ppo_mini_batch_size` rows, one AdamW step for each.

        Needs `advantages`, `old_log_probs` and, for a sampled KL, `ref_log_probs`, all [T] float32 at
        rollout.temperature. Returns metrics `actor/...`: means over the mini-batches of token means over all ranks.
        Raises NumericalError when a loss or gradient is not finite.
        """
        lr = self.schedule.at(self.step)
        set_lr(self.learner.optimizer, lr)
        results = []
        for rows in self._mini_batches(len(batch)):
            means = self.learner.learn(batch.select(rows), self.objective, self.step)
            if means:
                results.append(means)
        self._release()
        self.step += 1
        metrics = {f"actor/{name}": sum(r[name] for r in results) / len(results) for name in (results or [{}])[0]}
        if self.role.actor.use_kl_loss:
            metrics["actor/kl_coef"] = self.role.actor.kl_loss_coef
        return metrics | {"actor/lr": lr, "actor/num_updates": float(len(results))}

    def gradients(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """The whole float32 gradient of `batch` taken as one mini-batch, by parameter name, on every rank.

        Nothing is clipped and no weight changes: for tests and for measuring gradient noise.
        """
        self.policy.train()
        self.learner.accumulate(batch, self.objective)
        named = self.policy.model.named_parameters()
        gradient = {name: whole(p.grad) for name, p in named if p.grad is not None}
        self.learner.optimizer.zero_grad()
        self._release()
        return gradient

    def follow_anchor(self, tau: float) -> None:
        """anchor <- tau anchor + (1 - tau) policy, on this rank's float32 shards: no communication."""
        anchor = self._model("anchor")
        anchor_rule.follow(local_shards(anchor), local_shards(self.policy), tau)
        reshard(anchor)

    def iter_full_parameters(self, of: Which = "policy") -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and whole float32 CPU tensor, one at a time; every rank must exhaust it."""
        return iter_full_parameters(self._model(of))

    def full_state_dict(self, of: Which = "policy") -> dict[str, torch.Tensor]:
        """All whole parameters on rank 0, {} on the others. A tied head is there once, under the embedding's name."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.iter_full_parameters(of):
            if dist.get_rank() == 0:
                state[name] = tensor
        return state

    def save_pretrained(self, path: str | Path, tokenizer: Any, of: Which = "policy") -> None:
        """Save in Hugging Face format, usable as `model.path`. Raises CheckpointError on every rank if it fails."""
        save_model(self._model(of), Path(path), tokenizer)

    def _load(self, path: str, fsdp: FsdpConfig | FrozenFsdpConfig, trained: bool) -> CausalModel:
        actor = self.role.actor
        mixed = actor.fsdp_config.mixed_precision
        return load_sharded(path, self.role.model, fsdp, mixed, self.device, actor.head_chunk_tokens, trained)

    def _model(self, of: Which) -> CausalModel:
        if of == "policy":
            return self.policy
        if self.anchor is None:
            raise ValueError("this engine was made without an anchor")
        return self.anchor

    @torch.no_grad()
    def _look(self, inputs: ModelInput) -> AnchorView:
        anchor = self._model("anchor")
        anchor.eval()
        return AnchorView(anchor.hidden(inputs), anchor.head(), EXACT_KL[self.role.actor.kl_loss_type])

    def _mini_batches(self, num_rows: int) -> Iterator[list[int]]:
        actor = self.role.actor
        generator = torch.Generator().manual_seed(hash((self.config.trainer.seed, self.step)) % 2**63)
        for _ in range(actor.ppo_epochs):
            order = torch.randperm(num_rows, generator=generator) if actor.shuffle else torch.arange(num_rows)
            yield from (part.tolist() for part in order.split(actor.ppo_mini_batch_size))

    def _release(self) -> None:
        reshard(self.policy)
        if self.anchor is not None:
            reshard(self.anchor)


def _budget(by_tokens: bool, max_tokens: int, micro_batch_size: int) -> Budget:
    """Row limits are given over all ranks, token limits per rank."""
    if by_tokens:
        return Budget(tokens=max_tokens)
    return Budget(rows=max(1, micro_batch_size // dist.get_world_size()))
