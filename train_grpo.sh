#!/usr/bin/env bash
# GRPO with a KL loss to the frozen start model, on one node. Needs a retrieval server (bash retrieval_launch.sh).
#   bash train_grpo.sh
#   DATA_DIR=data/mine BASE_MODEL=Qwen/Qwen2.5-7B N_GPUS=4 bash train_grpo.sh trainer.total_training_steps=20
# Settings from the environment, and those that all train scripts share: scripts/train_common.sh. Any further key=value
# wins; --cfg job prints the whole configuration.
set -euo pipefail

: "${DATA_DIR_DEFAULT:=data/nq_search}"
: "${BASE_MODEL_DEFAULT:=Qwen/Qwen2.5-3B}"
: "${EXPERIMENT_NAME_DEFAULT:=nq_search-grpo-qwen2.5-3b}"
source "$(dirname "${BASH_SOURCE[0]}")/scripts/train_common.sh"
check_settings "$@"

train "${SHARED[@]}" \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.use_kl_loss=true \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.rollout.n_agent=5 \
  max_turns=2 \
  trainer.logger=[console,wandb] \
  trainer.save_freq=100 \
  +trainer.val_before_train=true \
  -- "$@"
