#!/usr/bin/env bash
# The exact match of a model on DATA_DIR/test.parquet, set by set: validation of training's loop, greedy, without training.
# Needs a retrieval server (bash retrieval_launch.sh). Intervals, further metrics and baselines: docs/evaluation.md.
#   BASE_MODEL=verl_checkpoints/NAME/actor/global_step_1000 bash scripts/nq_hotpotqa/evaluate.sh
#   DATA_DIR=data/mine BASE_MODEL=Qwen/Qwen2.5-7B N_GPUS=4 bash scripts/nq_hotpotqa/evaluate.sh max_turns=2
# Settings from the environment, and those that all train scripts share: scripts/train_common.sh. Any further key=value wins.
set -euo pipefail

DATA_DIR_DEFAULT=data/nq_hotpotqa_train
BASE_MODEL_DEFAULT=PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo
# Each model has a folder of its own: a checkpoint's name is that of its run and step.
model=${BASE_MODEL:-$BASE_MODEL_DEFAULT}
for argument in "$@"; do
  if [[ $argument == actor_rollout_ref.model.path=* ]]; then model=${argument#*=}; fi
done
model=${model%/}
if [[ $model =~ ([^/]+)/(actor/)?(global_step_[0-9]+)$ ]]; then model=${BASH_REMATCH[1]}-${BASH_REMATCH[3]}; fi
EXPERIMENT_NAME_DEFAULT=evaluate-nq_hotpotqa-${model##*/}
source "$(dirname "${BASH_SOURCE[0]}")/../train_common.sh"
# Nothing is trained on: there need not be a train.parquet.
test_file=$(quoted "$TEST_DATA_DIR/test.parquet")
check_settings data.train_files="$test_file" "$@"

train "${SHARED[@]}" \
  data.train_files="$test_file" \
  actor_rollout_ref.actor.fsdp_config.param_offload=true \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  max_turns=4 \
  trainer.logger=[console] \
  +trainer.val_only=true \
  +trainer.val_before_train=true \
  -- "$@"
