"""The actor with its anchor: log-probs, the PPO update, following, saving. One object per rank, no Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from verl.algorithms import anchor as anchor_rule
from verl.config import Config, RefConfig, RolloutConfig
from verl.config.model import FrozenFsdpConfig, FsdpConfig
from verl.config.predicates import anchor_is_base
from verl.engine.anchor_reader import AnchorReader
from verl.engine.batching import Budget, ModelInput, RankValues, plan, trained_rows
from verl.engine.device import set_threads
from verl.engine.exchange import exchange, rows_of
from verl.engine.kl_objective import reads_anchor
from verl.engine.learner import Learner, TokenLoss
from verl.engine.loading import load_sharded
from verl.engine.lora import adapted_layers
from verl.engine.merging import iter_full_parameters, merged_tensors
from verl.engine.mini_batches import mean_of, micro_budget, mini_batches, rows_of_ranks
from verl.engine.model import CausalModel, layout_of, weights_of
from verl.engine.optimizer import Schedule, build_adamw
from verl.engine.policy_objective import PolicyObjective, require_old_policy
from verl.engine.reference_policy import ReferencePolicy
from verl.engine.residence import residence
from verl.engine.restoring import load_saved
from verl.engine.resumable import Resumable
from verl.engine.saving import save_model
from verl.engine.sequence_parallel import sequence_group
from verl.engine.sharding import end_reading, local, reshard, whole
from verl.engine.token_values import POLICY_SCORES, TokenScores, token_values
from verl.engine.trained import TrainedEngine
from verl.errors import NumericalError
from verl.phases import Part, Phase
from verl.protocol import TrainBatch

logger = logging.getLogger(__name__)

Which = Literal["policy", "anchor"]


class PolicyEngine(TrainedEngine):
    """The trained policy, sharded over all ranks of the process group, and optionally its anchor beside it.

    Each rank gets the same whole batch in every call and works on its own rows. All methods are collective: every
    rank calls them in the same order.
    """

    def __init__(self, config: Config, device: torch.device, total_training_steps: int, with_anchor: bool) -> None:
        """Load `model.path` (and the anchor from `ref.path`, by default the same) and shard both.

        With adapters an anchor that is the model they were added to, and does not move, is the policy without them.

        `total_training_steps` is the length of the learning-rate schedule unless optim.total_training_steps says
        otherwise. The process group must exist. Raises ConfigError.
        """
        self.config = config
        self.device = device
        self.role = config.actor_rollout_ref
        actor = self.role.actor
        set_threads(actor.num_threads)
        self.policy = self._load(self.role.model.path, actor.fsdp_config, trained=True)
        self.anchor = self._anchor() if with_anchor else None
        loaded = [self.policy.model] + ([] if self.anchor is None else [self.anchor.model])
        sequence = sequence_group(device, actor.ulysses_sequence_parallel_size)
        self.layout = layout_of(loaded, self.role.model.use_remove_padding, sequence)
        optim = actor.optim
        optimizer = build_adamw(self.policy.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay)
        temperature = self.role.rollout.temperature
        self.reader = None if self.anchor is None else AnchorReader(self.anchor, temperature)
        self.objective = PolicyObjective(actor, self.policy, temperature, self.reader)
        learner = Learner(
            self.policy,
            optimizer,
            device,
            self._budget(actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size),
            actor.grad_clip,
            Path(config.trainer.default_local_dir) / "failures",
            self.layout,
            actor.fsdp_config.reduce_gradients,
            self.objective.weigh,
        )
        own_anchor = self.anchor if isinstance(self.anchor, CausalModel) else None
        models = {"policy": self.policy} | ({} if own_anchor is None else {"anchor": own_anchor})
        schedule = Schedule.from_config(optim, total_training_steps)
        frozen = None if own_anchor is None else (self.role.ref.fsdp_config, own_anchor)
        moved = residence(actor.fsdp_config, self.policy, optimizer, device, frozen)
        super().__init__(schedule, learner, Resumable(models, "policy", optimizer), moved)

    def log_probs(self, batch: TrainBatch, temperature: float, of: Which = "policy", top_k: int = 0) -> RankValues:
        """`log_prob` and `entropy` [T] float32 of the loss mask's tokens in this rank's rows.

        Logits are divided by `temperature` first. `top_k` adds `top_index` [T, k] int32: the most likely ids at each of
        these tokens.
        Raises NumericalError when a log-prob or entropy is not finite.
        """
        model = self.model_of(of)
        settings: RolloutConfig | RefConfig = self.role.rollout if of == "policy" else self.role.ref
        budget = self._budget(
            settings.log_prob_use_dynamic_bsz,
            settings.log_prob_max_token_len_per_gpu,
            settings.log_prob_micro_batch_size,
        )
        micro_batches = plan(batch.lengths_B, dist.get_world_size(), dist.get_rank(), budget, self.layout)
        with self.residence.during(Phase.SCORE, Part.PARAMETERS if self._is_policy(of) else Part.ANCHOR):
            found = token_values(model, batch, micro_batches, temperature, self.device, self.layout, top_k)
            end_reading(self.policy if self._is_policy(of) else model)
        if not all(found[name].isfinite().all() for name in ("log_prob", "entropy")):
            raise NumericalError(f"step {self.step}: the {of}'s log-probs are not finite; its weights have diverged")
        own = sorted(row for rows in micro_batches for row in rows)
        return RankValues(own, TrainBatch(batch.lengths_B, found).select(own).tokens)

    def update(self, batch: TrainBatch, own: RankValues | None = None) -> dict[str, float]:
        """One RL step: `ppo_epochs` passes over `mini_batches` of `ppo_mini_batch_size` rows, one AdamW step for each.

        Needs `advantages` and `old_log_probs` [T] float32 at rollout.temperature, and what the KL asks for
        (`kl_objective`). One optimizer step needs neither `old_log_probs` nor `top_index`: until then the policy is the
        one that they are of. Without `ref_log_probs` a sampled KL reads the anchor here, in every epoch. `own` are
        columns of which every rank has the rows that it computed (`top_index`); they are exchanged here. Returns
        metrics `actor/...`: means over the mini-batches of token means over all ranks. Raises NumericalError when a
        loss or gradient is not finite, ValueError when several optimizer steps lack a column.
        """
        parts = self._parts(batch)
        require_old_policy(self.role.actor, batch, own, len(parts))
        return self._update(batch, parts, own)

    def update_and_score(
        self, batch: TrainBatch, own: RankValues | None = None, names: Sequence[str] = POLICY_SCORES
    ) -> tuple[dict[str, float], RankValues]:
        """`update`, and what its first forward pass over each trained token in this rank's rows found [T] float32, 0
        elsewhere. `names`: `log_prob` and `entropy`, of an update by one optimizer step; `kl`, the KL in the loss
        before its weight. Raises ValueError for `log_prob` or `entropy` of several steps, and as `update` does.
        """
        parts = self._parts(batch)
        if len(parts) > 1 and set(names) & set(POLICY_SCORES):
            raise ValueError(f"{len(parts)} optimizer steps have no log-probs of one policy: call log_probs and update")
        require_old_policy(self.role.actor, batch, own, len(parts))
        scores = TokenScores(batch.lengths_B, names)
        return self._update(batch, parts, own, scores), scores.of_rank()

    def _budget(self, by_tokens: bool, max_tokens: int, micro_batch_size: int) -> Budget:
        return micro_budget(by_tokens, max_tokens, micro_batch_size, self.layout.ranks_per_row)

    def _parts(self, batch: TrainBatch) -> list[list[int]]:
        """The rows of each mini-batch of this step."""
        actor, seed, rows = self.role.actor, self.config.trainer.seed, trained_rows(batch)
        return list(mini_batches(rows, actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, seed, self.step))

    def _update(
        self,
        batch: TrainBatch,
        parts: Sequence[Sequence[int]],
        own: RankValues | None = None,
        scores: TokenScores | None = None,
    ) -> dict[str, float]:
        lr, results = self.set_lr_of_step(), []
        if own is not None:
            wanted = rows_of_ranks(batch.lengths_B, parts, self.learner.budget, self.layout)
            own = exchange(own, batch.lengths_B, wanted, self.device)
        first_epoch = len(parts) // self.role.actor.ppo_epochs
        batch = replace(batch, rows=batch.rows | {"row": torch.arange(len(batch))})
        with self.residence.during(Phase.UPDATE, *self._updated(batch)):
            for number, part in enumerate(parts):
                loss = partial(self._loss, batch.lengths_B, own, scores if number < first_epoch else None)
                means = self.learner.learn(batch.select(part), loss, self.step)
                if means:
                    results.append(means)
            self._release()
        self.end_step()
        metrics = mean_of(results, "actor")
        if self.role.actor.use_kl_loss:
            metrics["actor/kl_coef"] = self.role.actor.kl_loss_coef
        return metrics | {"actor/lr": lr, "actor/num_updates": float(len(results))}

    def _loss(
        self,
        lengths_B: torch.Tensor,
        own: RankValues | None,
        scores: TokenScores | None,
        micro_batch: TrainBatch,
        inputs: ModelInput,
    ) -> TokenLoss:
        """The objective on a micro-batch to which the columns of `own` are added; `scores` keeps what it found."""
        rows = micro_batch.rows["row"].tolist()
        if own is not None:
            micro_batch = replace(micro_batch, tokens=micro_batch.tokens | rows_of(own, lengths_B, rows))
        token_loss = self.objective(micro_batch, inputs)
        if scores is not None:
            scores.add(rows, inputs, token_loss.scores)
        return token_loss

    def gradients(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """The whole float32 gradient of `batch` taken as one mini-batch, by parameter name, on every rank.

        Nothing is clipped and no weight changes: for tests and for measuring gradient noise.
        """
        self.policy.train()
        with self.residence.during(Phase.UPDATE, *self._updated(batch)):
            self.learner.accumulate(batch, self.objective)
            named = self.policy.model.named_parameters()
            gradient = {name: whole(p.grad) for name, p in named if p.grad is not None}
            self.learner.optimizer.zero_grad()
            self._release()
        return gradient

    def follow_anchor(self, tau: float) -> None:
        """anchor <- tau anchor + (1 - tau) policy, on this rank's float32 shards; adapters are merged for it.

        Only merging takes communication, of adapters. Raises ValueError for an anchor that is the policy's own base.
        """
        anchor = self._own_weights_of("anchor")
        with self.residence.during(Phase.UPDATE, Part.PARAMETERS, Part.ANCHOR):
            reshard(self.policy)
            mine = [local(tensor) for _, tensor in weights_of(anchor.model) if tensor.is_floating_point()]
            theirs = (local(tensor) for _, tensor in merged_tensors(self.policy) if tensor.is_floating_point())
            if any(adapted_layers(self.policy)):  # what is merged takes memory: one weight at a time
                for pair in zip(mine, theirs, strict=True):
                    anchor_rule.follow(pair[:1], pair[1:], tau)
            else:
                anchor_rule.follow(mine, list(theirs), tau)
            reshard(anchor)

    def iter_full_parameters(self, of: Which = "policy") -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and whole float32 CPU tensor, one at a time; every rank must exhaust it."""
        return iter_full_parameters(self.model_of(of))

    def full_state_dict(self, of: Which = "policy") -> dict[str, torch.Tensor]:
        """All whole parameters on rank 0, {} on the others. A tied head is there once, under the embedding's name."""
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.iter_full_parameters(of):
            if dist.get_rank() == 0:
                state[name] = tensor
        return state

    def load_saved(self, path: Path, of: Which = "policy") -> None:
        """Replace the weights by a saved model's. The policy's optimizer starts anew. Raises CheckpointError."""
        load_saved(self._own_weights_of(of), path)
        if of == "policy":
            self.learner.optimizer.state.clear()

    def save_pretrained(self, path: str | Path, tokenizer: Any, of: Which = "policy") -> None:
        """Save in Hugging Face format, usable as `model.path`. Raises CheckpointError on every rank if it fails."""
        save_model(self._own_weights_of(of), Path(path), tokenizer)

    def _load(self, path: str, fsdp: FsdpConfig | FrozenFsdpConfig, trained: bool) -> CausalModel:
        actor = self.role.actor
        mixed = actor.fsdp_config.mixed_precision
        head = actor.head_chunk_tokens, trained, actor.head_dtype, self.config.trainer.seed
        return load_sharded(path, self.role.model, fsdp, mixed, self.device, *head)

    def _anchor(self) -> CausalModel | ReferencePolicy:
        if anchor_is_base(self.config):
            return ReferencePolicy(self.policy)
        return self._load(self.role.ref.path or self.role.model.path, self.role.ref.fsdp_config, trained=False)

    def model_of(self, of: Which) -> CausalModel | ReferencePolicy:
        """The sharded model. Raises ValueError for the anchor of an engine without one."""
        if of == "policy":
            return self.policy
        if self.anchor is None:
            raise ValueError("this engine was made without an anchor")
        return self.anchor

    def _own_weights_of(self, of: Which) -> CausalModel:
        model = self.model_of(of)
        if isinstance(model, ReferencePolicy):
            raise ValueError("this anchor is the policy without its adapters: it cannot move, be loaded or be saved")
        return model

    def _is_policy(self, of: Which) -> bool:
        """Whether the weights are the policy's, with adapters or without."""
        return of == "policy" or isinstance(self.anchor, ReferencePolicy)

    def _updated(self, batch: TrainBatch) -> list[Part]:
        """What an update of the policy has on the device; the anchor only where the loss reads its weights."""
        trained = [Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER]
        return [*trained, Part.ANCHOR] if reads_anchor(self.role.actor, batch) else trained

    def _release(self) -> None:
        reshard(self.policy)
        if self.reader is not None:
            self.reader.release()
