#!/usr/bin/env bash
# GRPO of a 72B model on several nodes of a Ray cluster: docs/multinode.md.
#   RAY_DASHBOARD_ADDRESS=http://HEAD:8265 N_NODES=4 bash example/multinode/train_grpo_multinode_72b.sh
# Settings from the environment: scripts/train_common.sh. Any further key=value wins over what stands here.
set -euo pipefail

DATA_DIR_DEFAULT=data/nq_hotpotqa_train
BASE_MODEL_DEFAULT=Qwen/Qwen2.5-72B
EXPERIMENT_NAME_DEFAULT=nq_hotpotqa_train-grpo-qwen2.5-72b
N_NODES_DEFAULT=4
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/train_common.sh"
check_settings "$@"

train \
  data.train_files="$TRAIN_DATA_DIR/train.parquet" \
  data.val_files="$TEST_DATA_DIR/test.parquet" \
  data.train_data_num=null \
  data.val_data_num=null \
  data.train_batch_size=512 \
  data.val_batch_size=256 \
  data.max_prompt_length=4096 \
  data.max_response_length=500 \
  data.max_start_length=2048 \
  data.max_obs_length=500 \
  data.shuffle_train_dataloader=True \
  algorithm.adv_estimator=grpo \
  algorithm.no_think_rl=false \
  actor_rollout_ref.model.path="$BASE_MODEL" \
  actor_rollout_ref.model.enable_gradient_checkpointing=true \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.optim.lr=1e-7 \
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \
  actor_rollout_ref.actor.use_kl_loss=true \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size=32 \
  actor_rollout_ref.actor.state_masking=true \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.grad_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.ref.log_prob_micro_batch_size=32 \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n_agent=5 \
  actor_rollout_ref.rollout.temperature=1 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size=32 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  retriever.url=http://127.0.0.1:8000/retrieve \
  retriever.topk=3 \
  max_turns=4 \
  trainer.logger=[wandb] \
  trainer.project_name="$WAND_PROJECT" \
  trainer.experiment_name="$EXPERIMENT_NAME" \
  trainer.default_local_dir="verl_checkpoints/$EXPERIMENT_NAME" \
  trainer.default_hdfs_dir=null \
  trainer.n_gpus_per_node="$N_GPUS" \
  trainer.nnodes="$N_NODES" \
  trainer.total_epochs=15 \
  trainer.total_training_steps=1005 \
  trainer.save_freq=100 \
  trainer.test_freq=100 \
  +trainer.val_only=false \
  +trainer.val_before_train=false \
  -- "$@"
