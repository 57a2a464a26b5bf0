"""What a configuration asks for, worked out from several of its keys: for trainer, engines and checks."""

from __future__ import annotations

from collections.abc import Iterator

from verl.algorithms.traits import ESTIMATOR_TRAITS, EstimatorTraits
from verl.config.sections.actor import ActorConfig
from verl.config.sections.schema import Config


def estimator_traits(config: Config) -> EstimatorTraits:
    """The traits of the run's advantage estimator."""
    return ESTIMATOR_TRAITS[config.algorithm.adv_estimator]


def has_critic(config: Config) -> bool:
    """Whether the run trains a critic; validation alone needs none."""
    return estimator_traits(config).needs_critic and not config.trainer.val_only


def has_kl_in_reward(config: Config) -> bool:
    """Whether rewards are reduced by the KL to the anchor; by default as published."""
    wanted = config.algorithm.use_kl_in_reward
    if wanted is not None:
        return wanted
    return estimator_traits(config).kl_in_reward and not config.actor_rollout_ref.actor.use_kl_loss


def anchor_is_read(config: Config) -> bool:
    """Whether loss, rewards or validation read the anchor."""
    in_loss = config.actor_rollout_ref.actor.use_kl_loss
    return in_loss or has_kl_in_reward(config) or config.trainer.eval_ref_policy_freq > 0


def has_anchor(config: Config) -> bool:
    """Whether the actor has an anchor beside the policy; validation alone needs none."""
    return anchor_is_read(config) and not config.trainer.val_only


def anchor_moves(config: Config) -> bool:
    """Whether there is an anchor that follows the policy."""
    return has_anchor(config) and config.algorithm.ref_policy_ema_tau < 1


def anchor_is_base(config: Config) -> bool:
    """Whether the anchor is the policy without its adapters, so that it takes no memory of its own."""
    role = config.actor_rollout_ref
    stays = config.algorithm.ref_policy_ema_tau == 1
    return role.model.lora_rank > 0 and stays and role.ref.path in (None, role.model.path)


def has_exact_kl(actor: ActorConfig) -> bool:
    """Whether the KL in the loss is summed over the vocabulary, or over the top k and estimated beyond."""
    return actor.use_kl_loss and actor.kl_loss_type.startswith("full_")


def loss_spans_rollout(actor: ActorConfig) -> bool:
    """Whether the loss of a token depends on other tokens of its rollout, so that one pass has to see them all."""
    return actor.policy_loss == "gspo" or (actor.llds_coef != 0 and actor.llds_gate == "response")


def has_sampled_kl(actor: ActorConfig) -> bool:
    """Whether the KL in the loss is estimated from the sampled tokens alone."""
    return actor.use_kl_loss and not has_exact_kl(actor)


def topk_of(actor: ActorConfig) -> int:
    """k of the Top-k KL, 0 when the KL is another one."""
    return max(0, actor.kl_topk_tokens or 0) if has_exact_kl(actor) else 0


def samples_kl(actor: ActorConfig) -> bool:
    """Whether the KL in the loss has a part that is estimated from the sampled token: all of it, or the Top-k tail."""
    return has_sampled_kl(actor) or (topk_of(actor) > 0 and actor.kl_use_tail_sampling)


def policy_topk(actor: ActorConfig) -> int:
    """k of the policy's most likely tokens, `top_index`, that the KL sums over; 0 for none."""
    return topk_of(actor) if actor.kl_loss_type == "full_reverse" else 0


def stores_token_values(config: Config) -> bool:
    """Whether the stored trajectories of a training step have what the update knew of each token."""
    return config.trainer.save_trajectories and config.trainer.save_token_values


def needs_ref_log_probs(config: Config) -> bool:
    """Whether a batch must have the anchor's log-probs of the sampled tokens before the update."""
    in_loss = has_sampled_kl(config.actor_rollout_ref.actor)
    return has_kl_in_reward(config) or (in_loss and not _reads_ref_in_update(config))


def _reads_ref_in_update(config: Config) -> bool:
    """Whether the update reads the anchor; by default not where that costs more than a pass before it would: each epoch
    would read it again, and off-loaded parameters would be on the device beside the policy's.
    """
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    beside = not ref.fsdp_config.param_offload or anchor_is_base(config)
    once = actor.ppo_epochs == 1 and beside
    return ref.log_probs == "update" or (ref.log_probs == "auto" and once)


def corrects_rollout(actor: ActorConfig) -> bool:
    """Whether the sampler's log-probs are compared with the trainer's, to weight or reject tokens."""
    return actor.rollout_correction.importance != "none" or actor.rollout_correction.reject != "none"


def truncates_sampling(config: Config) -> bool:
    """Whether unlikely tokens are never sampled, so that the sampler's distribution is not that of the policy."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.top_p < 1 or rollout.top_k > 0


def compares_sampler(config: Config) -> bool:
    """Whether every step has the trainer's own log-probs, and they should equal the sampler's for equal weights."""
    actor = config.actor_rollout_ref.actor
    scored = scores_in_update(config) or not actor.use_rollout_log_probs or policy_topk(actor) > 0
    return scored and not truncates_sampling(config)


def old_policy_is_current(config: Config) -> bool:
    """Whether the old log-probs are those of the policy that the first optimizer step of an RL step starts from."""
    return not (config.actor_rollout_ref.actor.use_rollout_log_probs and max_staleness(config))


def num_optimizer_steps(config: Config) -> int:
    """Optimizer steps of the actor on the trajectories of one RL step, when all of them are trained."""
    actor = config.actor_rollout_ref.actor
    return actor.ppo_epochs * num_mini_batches(trajectories_per_step(config), actor.ppo_mini_batch_size)


def scores_in_update(config: Config) -> bool:
    """Whether the update's own forward pass gives what is needed of the policy before its optimizer step."""
    wanted = config.actor_rollout_ref.actor.old_log_probs
    return wanted == "update" or (wanted == "auto" and not list(reasons_to_score_before(config)))


def reasons_to_score_before(config: Config) -> Iterator[str]:
    """Why the policy's log-probs have to be there before the update, each with what to do about it."""
    actor = config.actor_rollout_ref.actor
    if (steps := num_optimizer_steps(config)) > 1:
        total = trajectories_per_step(config)
        yield (
            f"after the first of {steps} optimizer steps the policy has changed (set ppo_epochs=1 and "
            f"ppo_mini_batch_size={total})"
        )
    if config.trainer.critic_warmup:
        yield "the actor is not updated while the critic warms up (set trainer.critic_warmup=0)"
    # The reasons below ask for old log-probs, and those of the rollout engine are already there.
    if actor.use_rollout_log_probs:
        return
    if has_kl_in_reward(config):
        yield "the KL in the reward uses them (set algorithm.use_kl_in_reward=False)"
    if corrects_rollout(actor):
        yield "rollout_correction compares them with the rollout engine's (set its importance and reject to none)"


# Numbers that follow from the configuration alone.


def trajectories_per_step(config: Config) -> int:
    """Trajectories sampled in one RL step, all of them successful."""
    rollout = config.actor_rollout_ref.rollout
    return config.data.train_batch_size * (rollout.n_agent if config.do_search else rollout.n)


def num_training_steps(config: Config, num_prompts: int) -> int:
    """RL steps of a run over so many training prompts."""
    return config.trainer.total_training_steps or _steps_of_epochs(config, num_prompts)


def length_warning(config: Config, num_prompts: int) -> str | None:
    """What to tell when `total_training_steps` makes a run longer than `total_epochs`, at which others end it."""
    steps, of_epochs = config.trainer.total_training_steps, _steps_of_epochs(config, num_prompts)
    if not steps or steps <= of_epochs:
        return None
    return (
        f"trainer.total_training_steps={steps} counts, not trainer.total_epochs={config.trainer.total_epochs}, which "
        f"is {of_epochs} steps of {num_prompts} prompts: to end there, set trainer.total_training_steps=null"
    )


def critic_warmup_warning(config: Config, num_prompts: int) -> str | None:
    """What to tell when the critic warms up to the end of the run, so that the actor stays as it is."""
    steps, warmup = num_training_steps(config, num_prompts), config.trainer.critic_warmup
    if warmup < steps:
        return None
    return f"trainer.critic_warmup={warmup} leaves none of the run's {steps} steps to train the actor: lower it"


def curriculum_warning(config: Config, num_prompts: int) -> str | None:
    """What to tell when a run with `data.curriculum` cannot get to its second epoch, where that begins to act."""
    filtering = config.algorithm.filter_groups
    rounds = filtering.max_num_gen_batches if filtering.enable else 1
    most = num_training_steps(config, num_prompts) * config.data.train_batch_size * rounds
    if not config.data.curriculum.enable or most > num_prompts:
        return None
    return (
        f"data.curriculum.enable=True has no effect in this run, which draws at most {most} of its {num_prompts} "
        "training prompts: it acts from the second epoch on"
    )


def _steps_of_epochs(config: Config, num_prompts: int) -> int:
    return max(1, num_prompts // config.data.train_batch_size) * config.trainer.total_epochs


def num_mini_batches(num_rows: int, size: int) -> int:
    """The number of mini-batches, at least 1, that come nearest to `size` rows each (half-way: the smaller ones)."""
    return max(1, (2 * num_rows + size) // (2 * size))


def largest_mini_batch(num_rows: int, size: int) -> int:
    """Rows of the largest mini-batch: they are even, so at most half as many again as `size`."""
    return -(-num_rows // num_mini_batches(num_rows, size))


def window_of(config: Config) -> int:
    """The largest length of a sequence, in tokens."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def max_staleness(config: Config) -> int:
    """The largest staleness of a token, in versions of the weights; 0: a step is sampled with those that it trains.

    A group that `rollout.over_sample` carries over is a version older than the others.
    """
    trainer = config.trainer
    if trainer.max_staleness is not None:
        return trainer.max_staleness
    return int(trainer.async_rollout != "off") + int(over_samples(config))


def max_steps_ahead(config: Config) -> int:
    """How many versions old the weights may be when they begin to sample a step; 0: none is sampled ahead."""
    return 0 if config.trainer.async_rollout == "off" else max_staleness(config) - int(over_samples(config))


def over_samples(config: Config) -> bool:
    return config.actor_rollout_ref.rollout.over_sample > 0
