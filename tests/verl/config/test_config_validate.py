"""Relations between keys, keys without effect, and what this version does not have."""

from __future__ import annotations

import operator

import pytest
import yaml
from run_config import run_config

from verl.config import check_supported
from verl.config.loading.run import load_sft_config
from verl.config.rules.config_warnings import config_warnings
from verl.config.rules.predicates import (
    critic_warmup_warning,
    curriculum_warning,
    length_warning,
    num_training_steps,
)
from verl.config.rules.without_effect import INERT_KEYS
from verl.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
REFERENCE = "actor_rollout_ref.ref.fsdp_config"
ROLLOUT = "actor_rollout_ref.rollout"
ULYSSES = "ulysses_sequence_parallel_size"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n_agent=4"]
REINFORCE = ["algorithm.adv_estimator=reinforce", "algorithm.norm_adv_by_std_in_grpo=false"]
KL_LOSS = f"{ACTOR}.use_kl_loss=true"
ONE_UPDATE = [f"{ACTOR}.ppo_mini_batch_size=1024"]
ONE_GRPO_UPDATE = [*GRPO, f"{ACTOR}.ppo_mini_batch_size=4096", f"{ACTOR}.old_log_probs=update"]
GAE = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=false"]
TOP_K = [KL_LOSS, f"{ACTOR}.kl_loss_type=full_reverse", f"{ACTOR}.kl_topk_tokens=32"]
ADAPTIVE = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.1"]
CORRECTION = f"{ACTOR}.rollout_correction"
SPLIT = "trainer.layout=split"
NODES = [SPLIT, f"{ROLLOUT}.nnodes=2"]
PER_NODE = ["retriever.placement=per_node", "retriever.launch=serve"]
OF_ROLLOUT = f"{ACTOR}.use_rollout_log_probs=true"
ONE_STEP_OFF = ["trainer.async_rollout=one_step_off", "trainer.device=cpu"]
GUARD = "trainer.collapse_guard"
CURRICULUM = "data.curriculum.enable=true"
DYNAMIC_SAMPLING = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3")
NO_DEFAULT_LIMITS = [
    f"{GUARD}.{name}=null" for name in ("dead_run_steps", "max_invalid_action_ratio", "max_repetition")
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.model.lora_rank=-1"], "actor_rollout_ref.model.lora_rank"),
        (["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=0"], "model.lora_alpha"),
        (["actor_rollout_ref.model.lora_alpha=32"], "lora_alpha has no effect with lora_rank=0, because all weights"),
        (["critic.model.target_modules=[q_proj]"], "critic.model.target_modules has no effect with lora_rank=0"),
        (["critic.model.lora_rank=8", "critic.model.target_modules=[]"], "critic.model.target_modules is empty"),
        (["data.max_start_length=600"], "data.max_start_length (600) is larger than data.max_prompt_length (512)"),
        (["data.max_obs_length=600"], "data.max_obs_length (600) is larger"),
        (["data.max_response_length=600"], "data.max_response_length (600) is larger"),
        ([f"{ROLLOUT}.n=2"], f"{ROLLOUT}.n must be 1 with do_search=true: set {ROLLOUT}.n_agent=2"),
        (["do_search=false", f"{ROLLOUT}.n_agent=2"], f"{ROLLOUT}.n_agent has no effect with do_search=false"),
        (["algorithm.adv_estimator=grpo"], "adv_estimator=grpo compares the trajectories of one prompt, and"),
        (["algorithm.adv_estimator=rloo"], "adv_estimator=rloo compares the trajectories of one prompt"),
        (["algorithm.adv_estimator=opo"], "adv_estimator=opo compares the trajectories of one prompt"),
        (["algorithm.adv_estimator=reinforce_plus_plus_baseline"], "reinforce_plus_plus_baseline compares the"),
        (["algorithm.filter_groups.enable=true"], "algorithm.filter_groups compares the trajectories of one prompt"),
        ([CURRICULUM, "algorithm.adv_estimator=grpo"], "adv_estimator=grpo compares the trajectories of one prompt"),
        ([CURRICULUM, f"{ROLLOUT}.n_agent=2"], "but algorithm.adv_estimator=gae learns from them, too: set data.curr"),
        ([CURRICULUM, "algorithm.adv_estimator=remax"], "(grpo, grpo_turns, opo, reinforce_plus_plus_baseline, rloo)"),
        (
            [*GRPO, CURRICULUM, "data.curriculum.keep_probability=0.1", "data.curriculum.min_keep_probability=0.2"],
            "min_keep_probability (0.2) is larger than data.curriculum.keep_probability (0.1), which it limits",
        ),
        *(
            ([*GRPO, CURRICULUM, f"data.curriculum.{setting}"], f"data.curriculum.{setting.partition('=')[0]}")
            for setting in ("keep_probability=0", "keep_probability=1.01", "min_keep_probability=0")
        ),
        ([*GRPO, CURRICULUM, "data.curriculum.min_keep_probability=1"], "data.curriculum.min_keep_probability"),
        (["algorithm.adv_estimator=grpo", "do_search=false"], f"set {ROLLOUT}.n to 2 or more"),
        (["data.train_batch_size=100"], f"{ACTOR}.ppo_mini_batch_size (256) is larger than the 100 trajectories"),
        (["trainer.n_gpus_per_node=1"], f"{ROLLOUT}.tensor_model_parallel_size (2) must divide"),
        # Two nodes have the GPUs that such an engine needs, but none has them alone.
        (["trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size=16"], "parallelism across nodes is not available"),
        (
            ["trainer.nnodes=2", "trainer.n_gpus_per_node=6", f"{ROLLOUT}.tensor_model_parallel_size=4"],
            "(4) must divide the number of GPUs per node that sample (6): the ranks of an engine are",
        ),
        ([SPLIT, "trainer.rollout_gpus_per_node=3"], "(2) must divide the number of GPUs per node that sample (3)"),
        ([SPLIT], "trainer.rollout_gpus_per_node=null: set it to the number of GPUs per node that"),
        ([SPLIT, "trainer.rollout_gpus_per_node=8"], "fewer than the 8 of trainer.n_gpus_per_node"),
        (["retriever.launch=serve"], "retriever.launch has no effect with retriever.placement=apart"),
        (["retriever.placement=per_node"], "needs the command that starts a retriever: "),
        (
            [*PER_NODE, "retriever.url=http://10.0.0.1:8000/retrieve"],
            "url=http://10.0.0.1:8000/retrieve is not a loopback",
        ),
        ([*PER_NODE, "retriever.engine=mine.Engine"], "but retriever.engine is used instead"),
        (["trainer.min_nnodes=2"], "trainer.min_nnodes=2 is more than trainer.nnodes=1"),
        (["trainer.rollout_gpus_per_node=4"], "has no effect with trainer.layout=colocated"),
        (
            [SPLIT, "trainer.rollout_gpus_per_node=4", "trainer.device=cpu"],
            "layout=split divides GPUs, but this run has none",
        ),
        ([f"{ROLLOUT}.nnodes=1"], f"{ROLLOUT}.nnodes=1 nodes would only sample, but with trainer.layout=colocated"),
        ([f"{ROLLOUT}.max_nnodes=4"], f"are for nodes that only sample, but {ROLLOUT}.nnodes=0"),
        (
            [SPLIT, f"{ROLLOUT}.nnodes=1", "trainer.rollout_gpus_per_node=4"],
            "trainer.rollout_gpus_per_node=4 divides each node",
        ),
        ([SPLIT, f"{ROLLOUT}.nnodes=3", f"{ROLLOUT}.max_nnodes=2"], f"max_nnodes=2 is fewer than {ROLLOUT}.nnodes=3"),
        ([*NODES, "trainer.device=cpu", f"{ROLLOUT}.num_engines=3"], "num_engines=3 cannot be divided equally by"),
        ([*NODES, f"{ROLLOUT}.n_gpus_per_node=3"], "(2) must divide the number of GPUs per node that sample (3)"),
        ([f"{ACTOR}.strategy=megatron"], f"{ACTOR}.strategy=megatron is not available"),
        (["critic.strategy=megatron"], "critic.strategy=megatron is not available"),
        ([*GRPO, "algorithm.norm_adv_by_batch_std=true"], "and algorithm.norm_adv_by_std_in_grpo"),
        (["algorithm.use_kl_in_reward=false", "algorithm.apply_kl_after_advantage=true"], "needs algorithm.use_kl_in"),
        (["algorithm.use_future_kl_as_reward=true"], "needs algorithm.apply_kl_after_advantage=True"),
        (["algorithm.kl_ctrl.type=adaptive"], "needs algorithm.kl_ctrl.target_kl and algorithm.kl_ctrl.horizon"),
        # 1024 trajectories a step, 0.2 * 1024 = 204.8.
        ([*ADAPTIVE, "algorithm.kl_ctrl.horizon=204"], "in one step of 1024 trajectories: set it above 204.8"),
        ([*GRPO, "algorithm.gamma=0.9"], "algorithm.gamma has no effect with algorithm.adv_estimator=grpo"),
        ([*GRPO, "algorithm.lam=0.9"], "algorithm.lam has no effect with algorithm.adv_estimator=grpo"),
        ([*GRPO, "algorithm.gae_over_environment_tokens=true"], "gae_over_environment_tokens has no effect with"),
        ([*GRPO, "trainer.critic_warmup=5"], "there is no critic with algorithm.adv_estimator=grpo"),
        (["algorithm.norm_adv_by_batch_std=true"], "no effect with algorithm.adv_estimator=gae"),
        ([f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"], "because the KL would count twice"),
        ([KL_LOSS, f"{ACTOR}.kl_topk_tokens=8"], "has no effect with kl_loss_type=low_var_kl"),
        ([KL_LOSS, f"{ACTOR}.kl_topk_gradient=published"], f"is for a Top-k KL: set {ACTOR}.kl_topk_tokens"),
        ([*TOP_K, f"{ACTOR}.kl_topk_gradient=published", f"{ACTOR}.kl_topk_tokens=0"], "is for a Top-k KL"),
        ([KL_LOSS, f"{ACTOR}.kl_use_tail_sampling=false"], "kl_use_tail_sampling=False is for a Top-k KL"),
        (
            [KL_LOSS, f"{ACTOR}.use_kl_iw=true", f"{ACTOR}.kl_iw_clip_lower=2", f"{ACTOR}.kl_iw_clip_upper=1"],
            "kl_iw_clip_lower (2.0) is larger than",
        ),
        ([KL_LOSS, f"{ACTOR}.kl_iw_clip_lower=2"], "kl_iw_clip_lower has no effect with use_kl_iw=False"),
        ([f"{ACTOR}.use_kl_iw=true"], f"no effect with use_kl_loss=False: set {ACTOR}.use_kl_loss=T"),
        (
            [f"{ACTOR}.kl_topk_tokens=32", f"{ACTOR}.kl_loss_type=full_reverse"],
            "kl_topk_tokens=32 has no effect with use_kl_loss=False",
        ),
        ([f"{ACTOR}.kl_topk_gradient=published"], "kl_topk_gradient=published has no effect with use_kl_loss=False"),
        ([*GRPO, *ADAPTIVE, "algorithm.kl_ctrl.horizon=10000"], "coefficient of a KL in the reward, and there is none"),
        ([KL_LOSS, *ADAPTIVE, "algorithm.kl_ctrl.horizon=10000"], f"=True (and {ACTOR}.use_kl_loss=False)"),
        (["algorithm.kl_ctrl.target_kl=0.1"], "algorithm.kl_ctrl.target_kl has no effect with type=fixed"),
        (["algorithm.kl_ctrl.horizon=1000"], "algorithm.kl_ctrl.horizon has no effect with type=fixed"),
        (
            [f"{ACTOR}.policy_loss=gspo"],
            "policy_loss=gspo has one ratio per trajectory, but loss_agg_mode=token-mean counts it once per token: "
            f"set {ACTOR}.loss_agg_mode=seq-mean-token-mean",
        ),
        ([f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"], "mode=seq-mean-token-sum counts"),
        # 1024 trajectories a step in mini-batches of 256
        (
            [f"{ACTOR}.policy_loss=reinforce"],
            "policy_loss=reinforce does not correct for a policy that has changed, but 4 optimizer steps are made on "
            f"the trajectories of a step: set {ACTOR}.ppo_mini_batch_size=1024",
        ),
        ([*ONE_UPDATE, f"{ACTOR}.policy_loss=reinforce", f"{ACTOR}.ppo_epochs=2"], "but 2 optimizer steps are made"),
        ([*GRPO, "algorithm.ref_policy_ema_tau=0.9"], "moves an anchor that nothing uses"),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], f"set {ACTOR}.loss_scale_factor"),
        ([f"{ACTOR}.loss_scale_factor=512"], "loss_scale_factor has no effect with loss_agg_mode=token-mean"),
        ([f"{ACTOR}.clip_ratio_c=3", f"{ACTOR}.policy_loss=cispo"], "no effect with policy_loss=cispo"),
        (
            [*ONE_UPDATE, f"{ACTOR}.clip_ratio_c=3", f"{ACTOR}.policy_loss=reinforce"],
            "no effect with policy_loss=reinforce",
        ),
        ([f"{CORRECTION}.importance=token", OF_ROLLOUT], f"set {ACTOR}.use_rollout"),
        ([f"{CORRECTION}.reject=geometric", OF_ROLLOUT], f"set {ACTOR}.use_rollout"),
        ([*GRPO, f"{ACTOR}.old_log_probs=update"], "is too late: after the first of 16 optimizer steps the policy has"),
        ([*ONE_GRPO_UPDATE, "trainer.critic_warmup=2", *GAE], "the actor is not updated while the critic warms up"),
        ([*ONE_GRPO_UPDATE, "algorithm.use_kl_in_reward=true"], "is too late: the KL in the reward uses them"),
        ([*ONE_GRPO_UPDATE, f"{CORRECTION}.reject=token"], "rollout_correction compares them with the rollout"),
        (["actor_rollout_ref.ref.log_probs=update"], "ref.log_probs=update is too late: the KL in the reward reads"),
        ([*GRPO, "actor_rollout_ref.ref.log_probs=score"], "ref.log_probs=score has no effect: only a KL in the rew"),
        ([*TOP_K, "actor_rollout_ref.ref.log_probs=update"], "ref.log_probs=update has no effect"),
        ([KL_LOSS, f"{ACTOR}.ppo_epochs=2", "actor_rollout_ref.ref.log_probs=update"], "in every epoch: set ppo"),
        ([f"{CORRECTION}.reject_low=1.1"], f"{CORRECTION} must keep a ratio of 1"),
        ([f"{CORRECTION}.reject_high=0.9"], f"{CORRECTION} must keep a ratio of 1"),
        ([f"{CORRECTION}.importance_cap=0.9"], f"{CORRECTION} must keep a ratio of 1"),
        ([f"{ACTOR}.optim.min_lr_ratio=0.1"], f"{ACTOR}.optim.min_lr_ratio has no effect with warmup_style=constant"),
        (["critic.optim.min_lr_ratio=0.1"], "critic.optim.min_lr_ratio has no effect"),
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["trainer.resume_from_path=x"], "trainer.resume_from_path has no effect with resume_mode=disable"),
        (["retriever.timeout_s=90"], "retriever.deadline_s (all attempts) is shorter"),
        (["+retriever.engine_kwargs.a=1"], "retriever.engine_kwargs has no effect without retriever.engine"),
        (["retriever.url=localhost:8000/retrieve"], "'localhost:8000/retrieve' is not an address: write http://"),
        (["retriever.url='http://[::1:8000/'"], "'http://[::1:8000/' is not an address: write http://"),
        (["retriever.url=http://h:99999/retrieve"], "'http://h:99999/retrieve' is not an address: write http://"),
        (["retriever.url=http://:8000/retrieve"], "'http://:8000/retrieve' is not an address: write http://"),
        (["retriever.url='http://h:1/retrieve,u:p@h:2/retrieve'"], "retriever.url: 'h:2/retrieve' is not an address"),
        (["retriever.url='http://u:p/w@h:1/x'"], "retriever.url: 'http://***@h:1/x' is not an address"),
        (["agent.feedback='write <search> now'"], "agent.feedback contains <search>"),
        ([f"{ROLLOUT}.val_kwargs.temperature=0.5"], "val_kwargs.temperature has no effect with do_sample=False"),
        (["trainer.save_freq=0"], "trainer.save_freq must be a number of steps, or -1"),
        ([f"{GUARD}.action=rollback", "trainer.save_freq=0"], "trainer.save_freq must be a number of steps, or -1"),
        ([f"{GUARD}.action=rollback"], "needs checkpoints to go back to: set trainer.save_freq"),
        (
            [f"{GUARD}.action=rollback", "trainer.save_freq=10", "trainer.max_ckpt_to_keep=2"],
            "may come 20 steps after the first bad weights (patience, dead_run_steps), and with trainer.save_freq=10 "
            "the last 2 checkpoints may then all be bad: set trainer.max_ckpt_to_keep=3 or more",
        ),
        ([f"{GUARD}.min_entropy=1", f"{GUARD}.max_entropy=1"], "min_entropy (1.0) must be smaller than max_entropy"),
        ([f"{GUARD}.min_entropy=2", f"{GUARD}.max_entropy=1"], "min_entropy (2.0) must be smaller than max_entropy"),
        (NO_DEFAULT_LIMITS, f"{GUARD}.action=warn has nothing to watch: set one of its limits"),
        (
            ["reward_model.structure_format_score=0.7", "reward_model.retrieval_score=0.4"],
            "reward_model.structure_format_score (0.7) + reward_model.retrieval_score (0.4) is above 1",
        ),
        (
            ["reward_model.structure_format_score=0.7", "reward_model.final_format_score=0.4"],
            "reward_model.structure_format_score (0.7) + reward_model.final_format_score (0.4) is above 1",
        ),
        ([f"{ROLLOUT}.top_k=0"], f"{ROLLOUT}.top_k must be a number of tokens, or -1"),
        ([f"{ROLLOUT}.load_format=dummy_dtensor"], "names a loader that vLLM no longer has"),
    ],
)
def test_a_contradiction_is_an_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_config(overrides)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1, "one contradiction, one message"


@pytest.mark.parametrize(
    "overrides",
    [
        [*GRPO, "algorithm.norm_adv_by_std_in_grpo=false", "algorithm.norm_adv_by_batch_std=true"],
        [f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.min_lr_ratio=0.1"],
        ["algorithm.adv_estimator=grpo", "trainer.val_only=true"],
        ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9"],
        ["algorithm.adv_estimator=remax"],
        [*REINFORCE, "algorithm.norm_adv_by_batch_std=true"],
        [f"{ROLLOUT}.n_agent=2", "algorithm.filter_groups.enable=true"],
        ["algorithm.filter_groups.enable=true", "trainer.val_only=true"],
        [*GRPO, CURRICULUM, "data.curriculum.keep_probability=1", "data.curriculum.min_keep_probability=0.99"],
        [*GRPO, CURRICULUM, "algorithm.filter_groups.enable=true"],
        [CURRICULUM, "trainer.val_only=true"],
        ["algorithm.gamma=0.9", "algorithm.lam=0.9", "algorithm.gae_over_environment_tokens=true"],
        [*GRPO, f"{ACTOR}.use_kl_loss=true", "algorithm.ref_policy_ema_tau=0.9"],
        [*GRPO, "algorithm.use_kl_in_reward=true", "algorithm.ref_policy_ema_tau=0.9"],
        ["algorithm.ref_policy_ema_tau=0.9"],
        [*TOP_K, f"{ACTOR}.kl_topk_gradient=published"],
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=512"],
        [f"{ACTOR}.clip_ratio_c=3", f"{ACTOR}.policy_loss=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"],
        [*ONE_UPDATE, f"{ACTOR}.policy_loss=reinforce"],
        [f"{ACTOR}.ppo_mini_batch_size=800", f"{ACTOR}.policy_loss=reinforce"],  # 1024 rows: one mini-batch
        [f"{ACTOR}.policy_loss=reinforce", "trainer.val_only=true"],
        [KL_LOSS, f"{ACTOR}.use_kl_iw=true", f"{ACTOR}.kl_iw_clip_upper=2"],
        [*TOP_K, f"{ACTOR}.kl_use_tail_sampling=false"],
        [*GRPO, *ADAPTIVE, "algorithm.kl_ctrl.horizon=10000", "algorithm.use_kl_in_reward=true"],
        [f"{CORRECTION}.importance=token", f"{CORRECTION}.importance_cap=1"],
        [f"{CORRECTION}.reject=token", f"{CORRECTION}.reject_low=1", f"{CORRECTION}.reject_high=1"],
        [*GRPO, "data.train_batch_size=64"],
        ONE_GRPO_UPDATE,
        [KL_LOSS, "actor_rollout_ref.ref.log_probs=update"],
        [*ONE_GRPO_UPDATE, OF_ROLLOUT, f"{ACTOR}.llds_coef=0.1"],
        [f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=0.5"],
        [*ADAPTIVE, "algorithm.kl_ctrl.horizon=205"],
        [*ADAPTIVE, "algorithm.kl_ctrl.horizon=204", "trainer.val_only=true"],
        [f"{GUARD}.action=rollback", "trainer.save_freq=10"],
        [f"{GUARD}.action=rollback", "trainer.save_freq=10", "trainer.max_ckpt_to_keep=3"],
        [f"{GUARD}.action=rollback", "trainer.save_freq=20", "trainer.max_ckpt_to_keep=2"],
        [f"{GUARD}.action=stop", *NO_DEFAULT_LIMITS, f"{GUARD}.max_kl=1"],
        [f"{GUARD}.action='off'", *NO_DEFAULT_LIMITS],
        ["reward_model.structure_format_score=0.9", "reward_model.retrieval_score=0.1"],
        ["reward_model.structure_format_score=0.8", "reward_model.final_format_score=0.2"],
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=x"],
        ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[q_proj,v_proj]"],
        ["critic.model.lora_rank=8", "critic.model.lora_alpha=16.5"],
    ],
)
def test_what_belongs_together_is_accepted(overrides: list[str]) -> None:
    config = run_config(overrides)
    given = {key: yaml.safe_load(value) for key, value in (override.split("=", 1) for override in overrides)}
    assert {key: operator.attrgetter(key)(config) for key in given} == given


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["trainer.resume_from_path=x"], "trainer.resume_from_path has no effect with resume_mode=disable"),
        (["trainer.resume_mode=auto", "trainer.overwrite=archive"], "moves it away: choose one"),
        (["optim.min_lr_ratio=0.1"], "^optim.min_lr_ratio has no effect with warmup_style=constant"),
        (["optim.total_training_steps=0"], "^optim.total_training_steps must be a number of steps"),
    ],
)
def test_contradictions_in_a_warm_start(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_sft_config(overrides=overrides)


def test_a_critic_that_warms_up_to_the_end_is_told() -> None:
    ppo = ["algorithm.adv_estimator=gae", "trainer.critic_warmup=20"]
    assert critic_warmup_warning(run_config([*ppo, "trainer.total_training_steps=21"]), 105) is None
    warning = critic_warmup_warning(run_config([*ppo, "trainer.total_training_steps=20"]), 105)
    assert warning == "trainer.critic_warmup=20 leaves none of the run's 20 steps to train the actor: lower it"


def test_all_contradictions_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        run_config(["data.max_start_length=600", f"{ROLLOUT}.n=2", "trainer.test_freq=0"])
    assert len(str(caught.value).splitlines()) == 3


OTHER_VALUES = {
    "data.return_raw_input_ids": "True",
    "data.return_raw_chat": "True",
    "actor_rollout_ref.hybrid_engine": "False",
    f"{ROLLOUT}.do_sample": "False",
    "algorithm.no_think_rl": "True",
    "algorithm.state_masking.start_state_marker": "<doc>",
    "algorithm.state_masking.end_state_marker": "</doc>",
    "trainer.default_hdfs_dir": "hdfs://somewhere",
}


@pytest.mark.parametrize("key", INERT_KEYS)
def test_a_key_without_effect_says_so(key: str) -> None:
    value = OTHER_VALUES[key]
    with pytest.raises(ConfigError) as caught:
        run_config([f"{key}='{value}'" if "<" in value else f"{key}={value}"])
    assert str(caught.value).startswith(f"{key}={value} has no effect here: {INERT_KEYS[key]}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*GRPO, f"{ACTOR}.state_masking=false"], f"{ACTOR}.state_masking=False is not available"),
        (
            [*GRPO, f"{ACTOR}.{ULYSSES}=3"],
            f"{ACTOR}.{ULYSSES}=3 does not divide the 8 workers that train the actor: set it to a divisor, or to 1 to "
            "turn it off",
        ),
        (
            [*GRPO, f"{ACTOR}.{ULYSSES}=2", "actor_rollout_ref.model.use_remove_padding=false"],
            f"{ACTOR}.{ULYSSES}=2 needs actor_rollout_ref.model.use_remove_padding=True",
        ),
        ([*GRPO, f"actor_rollout_ref.ref.{ULYSSES}=2"], f"ref.{ULYSSES}=2 differs from the actor's (1)"),
        ([*GRPO, f"{ACTOR}.fsdp_config.fsdp_size=3"], f"{ACTOR}.fsdp_config.fsdp_size=3 does not divide the 8 workers"),
        (["critic.model.fsdp_config.fsdp_size=16"], "critic.model.fsdp_config.fsdp_size=16 does not divide the 8"),
        ([*GRPO, f"{REFERENCE}.fsdp_size=4"], f"{REFERENCE}.fsdp_size=4 differs from the actor's (-1)"),
        ([f"critic.{ULYSSES}=16"], f"critic.{ULYSSES}=16 does not divide the 8 workers that train the critic"),
        ([*GRPO, f"{ROLLOUT}.name=hf"], f"{ROLLOUT}.name=hf is not available"),
        ([*GRPO, "reward_model.enable=true"], "reward_model.enable=True is not available"),
        ([*GRPO, "reward_model.retrieval_score=0.1"], "main_ppo_format"),
    ],
)
def test_what_this_version_does_not_have_is_an_error(overrides: list[str], message: str) -> None:
    config = run_config(overrides)
    with pytest.raises(ConfigError) as caught:
        check_supported(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*GRPO, "algorithm.use_kl_in_reward=true"],
        [*GRPO, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k5+"],
        [*GRPO, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full_forward"],
        [*GRPO, *TOP_K],
        [*GRPO, f"{ACTOR}.fsdp_config.fsdp_size=8"],
        [*GRPO, f"{ACTOR}.fsdp_config.fsdp_size=8", "trainer.nnodes=4"],
        [*GRPO, f"{ACTOR}.{ULYSSES}=4"],
        [f"critic.{ULYSSES}=2"],
    ],
)
def test_what_this_version_has_is_accepted(overrides: list[str]) -> None:
    check_supported(run_config(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ROLLOUT}.top_p=0.95"], f"{ROLLOUT}.top_p=0.95 and top_k=-1 cut off unlikely tokens"),
        ([f"{ROLLOUT}.top_k=50"], "the update is biased"),
        *(([KL_LOSS, f"{ACTOR}.kl_loss_type={name}"], f"kl_loss_type={name} has a gradient") for name in ("kl", "k1")),
        *(
            (
                [*ONE_GRPO_UPDATE, f"{ACTOR}.llds_coef=0.1", f"{ACTOR}.{found}"],
                "llds_coef=0.1 has no effect with one op",
            )
            for found in ("old_log_probs=update", "old_log_probs=score", "use_rollout_log_probs=true")
        ),
    ],
)
def test_what_will_hardly_do_what_was_meant_is_warned_of(overrides: list[str], message: str) -> None:
    [doubt] = config_warnings(run_config([*GRPO, *overrides]))
    assert message in doubt
    assert list(config_warnings(run_config([*GRPO, *overrides, "trainer.val_only=true"]))) == []


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [KL_LOSS],
        [KL_LOSS, f"{ACTOR}.kl_loss_type=kl", f"{ACTOR}.kl_loss_coef=0"],
        [KL_LOSS, f"{ACTOR}.kl_loss_type=kl+"],
        [KL_LOSS, f"{ACTOR}.kl_loss_type=k2"],
        [f"{ACTOR}.llds_coef=0.1"],  # 16 optimizer steps
        [f"{ACTOR}.llds_coef=0.1", f"{ACTOR}.ppo_mini_batch_size=4096", f"{ACTOR}.ppo_epochs=2"],
        [f"{ACTOR}.llds_coef=0.1", f"{ACTOR}.ppo_mini_batch_size=4096", *ONE_STEP_OFF, OF_ROLLOUT],  # fell meanwhile
    ],
)
def test_no_doubt_about_usual_settings(overrides: list[str]) -> None:
    assert list(config_warnings(run_config([*GRPO, *overrides]))) == []


@pytest.mark.parametrize(
    ("steps", "epochs", "length", "warns"),
    [("null", 3, 30, False), ("30", 3, 30, False), ("31", 3, 31, True), ("1005", 1, 1005, True), ("8", 1, 8, False)],
)
def test_steps_win_over_epochs_and_the_run_says_so(steps: str, epochs: int, length: int, warns: bool) -> None:
    """105 prompts in batches of 10 are 10 steps an epoch."""
    settings = [f"trainer.total_training_steps={steps}", f"trainer.total_epochs={epochs}", "data.train_batch_size=10"]
    config = run_config([*settings, f"{ACTOR}.ppo_mini_batch_size=10"])
    assert num_training_steps(config, 105) == length
    warning = length_warning(config, 105)
    assert (warning is not None) == warns
    assert not warns or f"total_epochs={epochs}, which is {10 * epochs} steps of 105 prompts" in str(warning)


@pytest.mark.parametrize(
    ("steps", "overrides", "warns"),
    [
        (10, (), True),
        (11, (), False),
        (10, ("data.curriculum.enable=false",), False),
        (3, DYNAMIC_SAMPLING, True),
        (4, DYNAMIC_SAMPLING, False),
    ],
)
def test_a_run_of_one_epoch_says_that_its_curriculum_has_no_effect(
    steps: int, overrides: tuple[str, ...], warns: bool
) -> None:
    """105 prompts in batches of 10; with dynamic sampling a step draws up to 3 batches."""
    sizes = ("data.train_batch_size=10", f"{ACTOR}.ppo_mini_batch_size=10")
    config = run_config([*GRPO, CURRICULUM, *sizes, f"trainer.total_training_steps={steps}", *overrides])
    warning = curriculum_warning(config, 105)
    assert (warning is not None) == warns
    assert not warns or "of its 105 training prompts: it acts from the second epoch on" in str(warning)
