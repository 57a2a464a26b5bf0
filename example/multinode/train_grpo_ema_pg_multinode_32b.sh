#!/usr/bin/env bash
# EMA-PG of a 32B model on several nodes of a Ray cluster: docs/multinode.md.
#   RAY_DASHBOARD_ADDRESS=http://HEAD:8265 N_NODES=4 bash example/multinode/train_grpo_ema_pg_multinode_32b.sh
# It is train_grpo_ema_pg.sh with the settings that stand here. Any further key=value wins; --cfg job prints the whole configuration.
set -euo pipefail

DATA_DIR_DEFAULT=data/nq_hotpotqa_train
BASE_MODEL_DEFAULT=Qwen/Qwen2.5-32B
EXPERIMENT_NAME_DEFAULT=nq_hotpotqa_train-grpo-ema-pg-qwen2.5-32b
N_NODES_DEFAULT=4
source "$(dirname "${BASH_SOURCE[0]}")/../../train_grpo_ema_pg.sh" \
  actor_rollout_ref.actor.optim.lr=2e-7 \
  actor_rollout_ref.actor.ppo_micro_batch_size=32 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size=32 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \
  -- "$@"
