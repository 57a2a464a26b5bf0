#!/usr/bin/env bash
# PPO with a learned critic (GAE) and a KL penalty in the reward, on one node. The critic starts from the same model.
# Needs a retrieval server (bash retrieval_launch.sh).
#   bash train_ppo.sh
#   DATA_DIR=data/mine BASE_MODEL=Qwen/Qwen2.5-7B N_GPUS=4 bash train_ppo.sh trainer.total_training_steps=20
# Settings from the environment, and those that all train scripts share: scripts/train_common.sh. Any further key=value
# wins; --cfg job prints the whole configuration.
set -euo pipefail

: "${DATA_DIR_DEFAULT:=data/nq_search}"
: "${BASE_MODEL_DEFAULT:=meta-llama/Llama-3.2-3B}"
: "${EXPERIMENT_NAME_DEFAULT:=nq_search-ppo-llama3.2-3b}"
source "$(dirname "${BASH_SOURCE[0]}")/scripts/train_common.sh"
check_settings "$@"

train "${SHARED[@]}" \
  algorithm.adv_estimator=gae \
  algorithm.kl_ctrl.kl_coef=0.001 \
  actor_rollout_ref.rollout.n_agent=1 \
  critic.model.path="$BASE_MODEL" \
  critic.model.use_remove_padding=True \
  critic.model.enable_gradient_checkpointing=true \
  critic.model.fsdp_config.param_offload=true \
  critic.model.fsdp_config.grad_offload=true \
  critic.model.fsdp_config.optimizer_offload=true \
  critic.optim.lr=1e-5 \
  critic.optim.lr_warmup_steps_ratio=0.015 \
  critic.ppo_micro_batch_size=8 \
  max_turns=2 \
  trainer.critic_warmup=0 \
  trainer.logger=[console,wandb] \
  trainer.save_freq=100 \
  +trainer.val_before_train=true \
  -- "$@"
