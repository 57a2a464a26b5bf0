"""The actor with its anchor: log-probs, the PPO update, following, saving. One object per rank, no Ray."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from verl.algorithms import anchor as anchor_rule
from verl.algorithms.kl import EXACT_KL
from verl.config import Config
from verl.engine.batching import Budget, ModelInput, model_input, plan, split_rows
from verl.engine.device import device_mesh, prepare_matmul, resolve_precision, set_threads
from verl.engine.head import AnchorView
from verl.engine.learner import Learner
from verl.engine.model import CausalModel, can_pack, load_causal_lm
from verl.engine.optimizer import Schedule, build_adamw, set_lr
from verl.engine.policy_objective import PolicyObjective
from verl.engine.saving import save_model
from verl.engine.sharding import iter_full_parameters, local_shards, reshard, shard, whole
from verl.errors import ConfigError, NumericalError
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
        settings: Any = self.role.rollout if of == "policy" else self.role.ref
        budget = _budget(
            settings.log_prob_use_dynamic_bsz,
            settings.log_prob_max_token_len_per_gpu,
            settings.log_prob_micro_batch_size,
        )
        lengths, num_tokens = batch.lengths_B, len(batch.tokens["ids"])
        starts_B = lengths.cumsum(0) - lengths
        log_prob_T, entropy_T = torch.zeros(num_tokens), torch.zeros(num_tokens)
        for rows in plan(lengths, range(len(batch)), dist.get_world_size(), dist.get_rank(), budget):
            micro_batch = batch.select(rows)
            inputs = model_input(micro_batch, self.device, self.packed)
            stats = model(inputs, temperature)
            if not rows:
                continue
            row_N = micro_batch.row_of_token_T[inputs.token_N]
            own_starts_B = micro_batch.lengths_B.cumsum(0) - micro_batch.lengths_B
            token_N = inputs.token_N + (starts_B[torch.tensor(rows)] - own_starts_B)[row_N]
            log_prob_T[token_N] = stats.log_prob_N.cpu()
            entropy_T[token_N] = stats.entropy_N.cpu()
        reshard(model)
        if not (log_prob_T.isfinite().all() and entropy_T.isfinite().all()):
            raise NumericalError(f"step {self.step}: the {of}'s log-probs are not finite; its weights have diverged")
        own = self.rows_of_rank(batch)
        values = TrainBatch(lengths, {"log_prob": log_prob_T, "entropy": entropy_T}).select(own).tokens
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

    def _load(self, path: str, fsdp: Any, trained: bool) -> CausalModel:
        model_config = self.role.model
        if fsdp.fsdp_size not in (-1, dist.get_world_size()):
            raise ConfigError(f"fsdp_size is {fsdp.fsdp_size}; only -1 (all {dist.get_world_size()} workers) works")
        for name in _names(model_config.external_lib):
            importlib.import_module(name)
        hf_model = load_causal_lm(
            path,
            self.device,
            model_config.override_config,
            model_config.trust_remote_code,
            gradient_checkpointing=trained and model_config.enable_gradient_checkpointing,
        )
        mixed = self.role.actor.fsdp_config.mixed_precision
        precision = resolve_precision(self.device, mixed.param_dtype, mixed.reduce_dtype)
        prepare_matmul(self.device, precision)
        model = CausalModel(hf_model, self.role.actor.head_chunk_tokens)
        model.requires_grad_(trained)
        offload = fsdp.param_offload or getattr(fsdp, "optimizer_offload", False)
        shard(model, device_mesh(self.device), precision, offload, fsdp.wrap_policy.min_num_params)
        return model

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


def _names(external_lib: str | list[str] | None) -> list[str]:
    if external_lib is None:
        return []
    return [external_lib] if isinstance(external_lib, str) else external_lib
