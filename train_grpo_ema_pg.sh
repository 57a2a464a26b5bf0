#!/usr/bin/env bash
# GRPO whose KL anchor is a moving average of the policy (EMA-PG), on one node. Needs a retrieval server
# (bash retrieval_launch.sh). The KL is summed over the 32 likeliest tokens and sampled for the rest. Its gradient is the
# corrected one (docs/topk_kl.md); actor_rollout_ref.actor.kl_topk_gradient=published gives that of EMA-PG, and
# actor_rollout_ref.actor.kl_topk_tokens=null the exact KL over the whole vocabulary.
#   bash train_grpo_ema_pg.sh
#   DATA_DIR=data/mine BASE_MODEL=Qwen/Qwen2.5-7B N_GPUS=4 bash train_grpo_ema_pg.sh trainer.total_training_steps=20
# Settings from the environment, and those that all train scripts share: scripts/train_common.sh. Any further key=value
# wins; --cfg job prints the whole configuration.
set -euo pipefail

: "${DATA_DIR_DEFAULT:=data/nq_hotpotqa_train}"
: "${BASE_MODEL_DEFAULT:=Qwen/Qwen2.5-3B}"
: "${EXPERIMENT_NAME_DEFAULT:=nq_hotpotqa_train-grpo-ema-pg-qwen2.5-3b}"
source "$(dirname "${BASH_SOURCE[0]}")/scripts/train_common.sh"
check_settings "$@"

train "${SHARED[@]}" \
  algorithm.adv_estimator=grpo \
  +algorithm.ref_policy_ema_tau=0.9 \
  +algorithm.ref_policy_ema_update_period=10 \
  actor_rollout_ref.actor.optim.betas=[0.9,0.95] \
  actor_rollout_ref.actor.use_kl_loss=true \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=full_reverse \
  actor_rollout_ref.actor.kl_topk_tokens=32 \
  actor_rollout_ref.actor.use_kl_iw=true \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.entropy_coeff=0.0 \
  actor_rollout_ref.rollout.n_agent=5 \
  max_turns=4 \
  trainer.logger=[console,wandb] \
  trainer.save_freq=50 \
  +trainer.val_before_train=false \
  +trainer.eval_ref_policy_freq=-1 \
  -- "$@"
