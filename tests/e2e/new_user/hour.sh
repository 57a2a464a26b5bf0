#!/usr/bin/env bash
# A new user's first hour: own documents, questions, prompt, reward and environment. Nothing of the clone is edited.
# Typed in a folder with the files beside this script:  CLONE=~/search-r1 MODEL=~/models/small PORT=8000 bash hour.sh
set -euo pipefail
python=$CLONE/.venv/bin/python
retriever=http://127.0.0.1:$PORT/retrieve
started=()
trap 'kill "${started[@]}" 2>/dev/null || true; wait' EXIT

say() { printf '\n== %s\n' "$*"; }
until_up() { until "$python" -c "import urllib.request; urllib.request.urlopen('$1', timeout=10)" 2>/dev/null; do sleep 0.2; done; }

say "search: my 30 documents"
CORPUS_PATH=corpus.jsonl PORT=$PORT bash "$CLONE/retrieval_launch.sh" >server.log 2>&1 &
started+=($!)

say "data: my 20 questions in my prompt"
for split in train test; do
  "$python" "$CLONE/scripts/data_process/qa_search_${split}_merge.py" --data_sources lighthouses=questions.jsonl \
    --template_type my_prompt.txt --local_dir data
done
until_up "http://127.0.0.1:$PORT/readyz"

say "would it start?"
settings=(
  agent.template=my_prompt.txt agent.environment=my_environment.Library reward.function=my_reward.compute_score
  "retriever.url=$retriever" retriever.topk=1 max_turns=1
  data.train_batch_size=4 actor_rollout_ref.rollout.n_agent=4 actor_rollout_ref.actor.ppo_mini_batch_size=16
  data.max_start_length=512 data.max_prompt_length=900 data.max_response_length=32 data.max_obs_length=200
  actor_rollout_ref.rollout.dtype=float32 trainer.logger='[console]' trainer.total_training_steps=3
  +trainer.val_before_train=false trainer.default_local_dir=run
  # The anchor follows at once, and is validated as the policy is.
  +algorithm.ref_policy_ema_update_period=1 actor_rollout_ref.actor.kl_loss_coef=0.1 +trainer.eval_ref_policy_freq=1
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0 actor_rollout_ref.actor.optim.lr=5e-4
)
export DATA_DIR=data BASE_MODEL=$MODEL N_GPUS=1
TRAINER=verl.trainer.preflight bash "$CLONE/train_grpo_ema_pg.sh" "${settings[@]}"

say "train: 3 steps with my reward and my environment"
bash "$CLONE/train_grpo_ema_pg.sh" "${settings[@]}"

say "train once more, by mistake"
bash "$CLONE/train_grpo_ema_pg.sh" "${settings[@]}" && exit 1

say "evaluate"
"$python" -m search_r1.evaluation --run run --data lighthouses=questions.jsonl --output_dir results

say "done"
