"""The actor with its anchor: log-probs, the PPO update, and the anchor's way behind the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from verl.algorithms import anchor as anchor_rule
from verl.config import Config
from verl.config.rules.predicates import anchor_is_base, loss_spans_rollout, old_policy_is_current
from verl.config.sections.model import FrozenFsdpConfig, FsdpConfig
from verl.config.sections.rollout import LogProbConfig
from verl.engine.batching import ModelInput, RankValues
from verl.engine.device.runtime import set_threads
from verl.engine.device.sequence_parallel import sequence_group
from verl.engine.device.sharding import end_reading, local, reshard
from verl.engine.files.loading import load_sharded
from verl.engine.hf_model import weights_of
from verl.engine.learner import LossFunction, TokenLoss
from verl.engine.lora import adapted_layers
from verl.engine.merging import merged_tensors
from verl.engine.micro_batches import mean_of, rows_of_ranks
from verl.engine.model import CausalModel, Decoder, ReferencePolicy, layout_of
from verl.engine.policy_objective import AnchorReader, PolicyObjective, reads_anchor, require_old_policy
from verl.engine.token_values import POLICY_SCORES, TokenScores, exchange, policy_scores, rows_of
from verl.engine.trained import TrainedEngine
from verl.phases import Part, Phase
from verl.protocol import TrainBatch

Which = Literal["policy", "anchor"]


class PolicyEngine(TrainedEngine):
    """The trained policy, and optionally its anchor beside it."""

    trained = "policy"

    def __init__(self, config: Config, device: torch.device, total_training_steps: int, with_anchor: bool) -> None:
        """Load `model.path` (and the anchor from `ref.path`, by default the same) and shard both.

        With adapters an anchor that is the model they were added to, and does not move, is the policy without them.
        The process group must exist. Raises ConfigError.
        """
        self.config, self.device, self.role = config, device, config.actor_rollout_ref
        actor, reference = self.role.actor, self.role.ref
        set_threads(actor.num_threads)

        # The models, and how both read a micro-batch.
        self.policy = self._load(self.role.model.path, actor.fsdp_config, trained=True)
        self.anchor: CausalModel | ReferencePolicy | None = None
        if with_anchor and anchor_is_base(config):
            self.anchor = ReferencePolicy(self.policy)
        elif with_anchor:
            self.anchor = self._load(reference.path or self.role.model.path, reference.fsdp_config, trained=False)
        loaded = [self.policy.model] + ([] if self.anchor is None else [self.anchor.model])
        sequence = sequence_group(device, actor.ulysses_sequence_parallel_size)
        layout = layout_of(loaded, self.role.model.use_remove_padding, sequence, actor.use_prefix_grouper)
        layout = replace(layout, whole_rollouts=loss_spans_rollout(actor))

        # What the policy is trained on; an anchor without weights of its own is no model to save or move.
        temperature = self.role.rollout.temperature
        self.reader = None if self.anchor is None else AnchorReader(self.anchor, temperature)
        trains = not config.trainer.val_only
        self.objective = PolicyObjective(actor, self.policy, temperature, self.reader, trains)
        models: dict[str, Decoder] = {"policy": self.policy}
        if isinstance(self.anchor, CausalModel):
            models["anchor"] = self.anchor
        of_actor = actor.fsdp_config, models, layout, total_training_steps
        super().__init__(config, actor, *of_actor, weigh=self.objective.weigh, frozen=reference.fsdp_config)

    def log_probs(self, batch: TrainBatch, temperature: float, of: Which = "policy", top_k: int = 0) -> RankValues:
        """`log_prob` and `entropy` [T] float32 of the loss mask's tokens in this rank's rows.

        Logits are divided by `temperature` first. `top_k` adds `top_index` [T, k] int32: the most likely ids at each of
        these tokens. Raises NumericalError when a log-prob or entropy is not finite.
        """
        model = self.model_of(of)
        settings: LogProbConfig = self.role.rollout if of == "policy" else self.role.ref
        budget = self.budget(
            settings.log_prob_use_dynamic_bsz,
            settings.log_prob_max_token_len_per_gpu,
            settings.log_prob_micro_batch_size,
        )
        # An anchor that is the policy without its adapters has no weights of its own: the policy's are moved and read.
        policy_weights = of == "policy" or isinstance(self.anchor, ReferencePolicy)
        part = Part.PARAMETERS if policy_weights else Part.ANCHOR
        release = partial(end_reading, self.policy if policy_weights else model)
        scores = policy_scores(model, temperature, top_k)
        return self.read(batch, budget, part, scores, release, f"the {of}'s log-probs")

    def update(self, batch: TrainBatch, own: RankValues | None = None) -> dict[str, float]:
        """Train the policy for one RL step; see `TrainedEngine.update`.

        Needs `advantages` and `old_log_probs` [T] float32 at rollout.temperature, and what the KL asks for
        (`build_kl`). One optimizer step needs neither `old_log_probs` nor `top_index`: until then the policy is the
        one that they are of. Without `ref_log_probs` a sampled KL reads the anchor here, in every epoch. `own` are
        columns of which every rank has the rows that it computed (`top_index`); they are exchanged here. Returns
        metrics `actor/...`: means over the mini-batches of token means over all ranks. Raises NumericalError when a
        loss or gradient is not finite, ValueError when several optimizer steps lack a column.
        """
        return self._update(batch, self.mini_batches(batch), own)

    def update_and_score(
        self, batch: TrainBatch, own: RankValues | None = None, names: Sequence[str] = POLICY_SCORES
    ) -> tuple[dict[str, float], RankValues]:
        """`update`, and what its first forward pass over each trained token in this rank's rows computed [T] float32, 0
        elsewhere. `names`: `log_prob` and `entropy`, of an update by one optimizer step; `kl`, the KL in the loss
        before its weight. Raises ValueError for `log_prob` or `entropy` of several steps, and as `update` does.
        """
        parts = self.mini_batches(batch)
        if len(parts) > 1 and set(names) & set(POLICY_SCORES):
            raise ValueError(f"{len(parts)} optimizer steps have no log-probs of one policy: call log_probs and update")
        scores = TokenScores(batch.lengths_B, names)
        return self._update(batch, parts, own, scores), scores.of_rank()

    def _update(
        self,
        batch: TrainBatch,
        parts: Sequence[Sequence[int]],
        own: RankValues | None,
        scores: TokenScores | None = None,
    ) -> dict[str, float]:
        actor = self.role.actor
        require_old_policy(actor, batch, own, len(parts))
        # Each rank gets the values of the rows that it is going to train, whichever rank computed them.
        if own is not None:
            wanted = rows_of_ranks(batch, parts, self.learner.budget, self.layout)
            own = exchange(own, batch.lengths_B, wanted, self.device)
        # Scores are kept in the first epoch, in which each row is trained once. In the first step the policy has not
        # moved from the old one, if the old log-probs are of the policy that the step starts from.
        first_epoch, first_moved = len(parts) // actor.ppo_epochs, int(old_policy_is_current(self.config))

        def loss(number: int) -> LossFunction:
            kept = scores if number < first_epoch else None
            return partial(self._loss, batch.lengths_B, own, kept, number >= first_moved)

        # Micro-batches carry their rows' numbers, by which `_loss` finds what belongs to them.
        numbered = replace(batch, rows=batch.rows | {"row": torch.arange(len(batch))})
        needed = [Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER, *[Part.ANCHOR] * reads_anchor(actor, batch)]
        steps, lr = self.take_steps(numbered, parts, loss, needed)
        metrics = mean_of(steps, "actor")
        if actor.use_kl_loss:
            metrics["actor/kl_coef"] = actor.kl_loss_coef
        return metrics | {"actor/lr": lr, "actor/num_updates": float(len(steps))}

    def _loss(
        self,
        lengths_B: torch.Tensor,
        own: RankValues | None,
        scores: TokenScores | None,
        moved: bool,
        micro_batch: TrainBatch,
        inputs: ModelInput,
    ) -> TokenLoss:
        """The objective on a micro-batch to which the columns of `own` are added; `scores` keeps what it computed."""
        rows = micro_batch.rows["row"].tolist()
        if own is not None:
            micro_batch = replace(micro_batch, tokens=micro_batch.tokens | rows_of(own, lengths_B, rows))
        token_loss = self.objective(micro_batch, inputs, moved)
        if scores is not None:
            scores.add(rows, inputs, token_loss.scores)
        return token_loss

    def follow_anchor(self, tau: float) -> None:
        """anchor <- tau anchor + (1 - tau) policy, on this rank's float32 shards; adapters are merged for it.

        Only merging takes communication, of adapters. Raises ValueError for an anchor that is the policy's own base.
        """
        anchor = self.own_weights("anchor")
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

    def release(self) -> None:
        super().release()
        if self.reader is not None:
            self.reader.release()

    def model_of(self, of: Which) -> CausalModel | ReferencePolicy:
        """The sharded model. Raises ValueError for the anchor of an engine without one."""
        if of == "policy":
            return self.policy
        if self.anchor is None:
            raise ValueError("this engine was made without an anchor")
        return self.anchor

    def own_weights(self, of: str | None) -> Decoder:
        if of == "anchor" and isinstance(self.model_of("anchor"), ReferencePolicy):
            raise ValueError("this anchor is the policy without its adapters: it cannot move, be loaded or be saved")
        return super().own_weights(of)

    def _load(self, path: str, fsdp: FsdpConfig | FrozenFsdpConfig, trained: bool) -> CausalModel:
        actor = self.role.actor
        mixed = actor.fsdp_config.mixed_precision
        head = actor.head_chunk_tokens, trained, actor.head_dtype, self.config.trainer.seed
        return load_sharded(path, self.role.model, fsdp, mixed, self.device, *head)
