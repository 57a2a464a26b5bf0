#!/usr/bin/env bash
# A real model on a laptop: SmolLM2-135M-Instruct learns to search Wikipedia passages and to answer from them, on 2 CPU
# cores. Warm start on written episodes, RL, and beside it a control: more of the warm start, for as long as RL took. All
# three are evaluated on questions that none of them has seen.
#   bash scripts/recipes/smollm2.sh --corpus FILE --questions FILE [FILE ...] [--chat] [--dense] [--small]
#     [--seed N] [--output_dir DIR] [-- key=value ...]
#   --corpus FILE     passages, .jsonl or .jsonl.gz (docs/retrieval.md)
#   --questions FILE  files of JSON lines with "question" and a list "golden_answers"; of these, the questions are used
#                     whose answer the first passage of a search has, or that of a second search for what the first names
#   --chat            the model calls a tool in its chat format, in place of writing tags
#   --dense           at the end, the trained model also with a dense retriever (all-MiniLM-L6-v2) in place of BM25
#   --small           a rehearsal of all of it in some minutes, in which nothing is learned
#   --seed N          other draws (0); the model, the questions and their splits stay
#   --output_dir DIR  where everything goes (runs/smollm2_seedN, or _chat_, _small_, _chat_small_)
#   -- key=value ...  overrides of the training config (docs/configuration.md)
# docs/real_model.md says what comes out of it, and how long it takes. Started again, it skips the phases that are done,
# and goes on with an interrupted training.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/phases_common.sh

corpus="" questions=() seed=0 run_dir="" dense=""
kind=smollm2 template=short of_model=()   # or with tool calls
sft_size=() rl_size=() evaluation_size=() # those of the configs, or small ones
while [[ $# -gt 0 ]]; do
  case "$1" in
    --help | -h) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' scripts/recipes/smollm2.sh; exit 0 ;;
    --corpus | --seed | --output_dir)
      [[ -n ${2-} ]] || fail "$1 needs a value; see --help"
      case "$1" in --corpus) corpus=$2 ;; --seed) seed=$2 ;; *) run_dir=$2 ;; esac
      shift 2
      ;;
    --chat) kind=smollm2_chat template=chat of_model=(--tool_calls); shift ;;
    --dense) dense=1; shift ;;
    --small)
      rl_size=(
        trainer.total_training_steps=3 trainer.test_freq=3 trainer.save_freq=3 data.train_batch_size=4
        actor_rollout_ref.rollout.n_agent=4 actor_rollout_ref.actor.ppo_mini_batch_size=16 data.val_data_num=8
        algorithm.filter_groups.enable=false
      )
      sft_size=(trainer.total_training_steps=3 data.train_batch_size=8)
      evaluation_size=(--subset 8)
      shift
      ;;
    --questions)
      shift
      while [[ $# -gt 0 && $1 != --* ]]; do questions+=("$1"); shift; done
      ;;
    --) shift; break ;;
    *) fail "unknown option $1; see --help (what overrides the training config goes behind --)" ;;
  esac
done
[[ $seed =~ ^[0-9]+$ ]] || fail "--seed is '$seed'; it must be a whole number from 0"
[[ -f $corpus ]] || fail "--corpus '$corpus' is no file; name one with passages"
[[ ${#questions[@]} -gt 0 ]] || fail "--questions is missing; name files with questions and answers"
for file in "${questions[@]}"; do [[ -f $file ]] || fail "--questions '$file' is no file"; done
run_dir="${run_dir:-runs/$kind${rl_size:+_small}_seed$seed}"

say "set-up"
bash scripts/setup.sh
python=.venv/bin/python
# One thread a role and waiting threads that sleep: the roles share two cores, and spinning threads would fight for them.
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

say "the model -> $run_dir/model"
once model search_r1/data/model.py -- "$run_dir/model" -m search_r1.data.model smollm2 --output_dir "$run_dir/model" \
  "${of_model[@]}"
export HF_HUB_OFFLINE=1

say "retrieval server over $corpus"
start_retriever "$corpus"

say "the questions that it can answer, in splits that share no passage -> $run_dir/questions"
once questions search_r1/data/corpus search_r1/data/qa "$corpus" "${questions[@]}" -- "$run_dir/questions" \
  -m search_r1.search.corpus_tool audit --corpus_path "$corpus" --questions "${questions[@]}" --url "$url" \
  --subsets "$run_dir/questions" --subset_k 1 --subset_shares 0.5,0.1,0.4
# files_of SPLIT: SUBSET=FILE for each subset that has questions, a line each.
files_of() {
  local subset
  for subset in direct second_query; do
    [[ ! -s $run_dir/questions/$subset/$1.jsonl ]] || echo "$subset=$run_dir/questions/$subset/$1.jsonl"
  done
}
for split in train validation test; do
  [[ -n $(files_of "$split") ]] || fail "no question for $split can be answered from $corpus; see $run_dir/questions"
  once "prompts_$split" search_r1/data/qa "search_r1/llm_agent/templates/$template.txt" "$run_dir/questions" -- \
    "$run_dir/prompts/$split" scripts/data_process/qa_search_train_merge.py --template_type "$template" \
    --data_sources "$(files_of "$split" | paste -sd,)" --local_dir "$run_dir/prompts/$split"
done

# rows NAME QUESTIONS SEED: written episodes for them.
rows() {
  once "rows_$1" search_r1/data/episodes "configs/$kind.yaml" "$2" "$run_dir/model" -- "$run_dir/rows/$1.parquet" \
    -m search_r1.data.episodes --config-name $kind --model "$run_dir/model" --questions "$2" --seed "$3" \
    --retriever_url "$url" --output "$run_dir/rows/$1.parquet"
}

say "written episodes -> $run_dir/rows"
rows train "$run_dir/prompts/train/train.parquet" "$seed"
rows validation "$run_dir/prompts/validation/train.parquet" "$seed"
written=("$(quoted "$run_dir/rows/train.parquet")")
# Twice as many of two searches: fewer would teach that one is nearly always enough.
if [[ -s $run_dir/questions/second_query/train.jsonl ]]; then
  rows again "$run_dir/questions/second_query/train.jsonl" "$((seed + 1000))"
  written+=(",$(quoted "$run_dir/rows/again.parquet")")
fi

# supervise NAME MODEL KEY=VALUE...: train on them.
supervise() {
  once "$1" configs/sft.yaml configs/smollm2_sft.yaml "$run_dir/rows" "$2" -- "$run_dir/$1" \
    -m verl.trainer.sft --config-name smollm2_sft model.path="$2" trainer.seed="$seed" \
    data.train_files="[$(printf %s "${written[@]}")]" \
    data.val_files="$(quoted "$run_dir/rows/validation.parquet")" \
    trainer.default_local_dir="$run_dir/$1" trainer.resume_mode=auto "${sft_size[@]}" "${@:3}"
}

say "warm start -> $run_dir/warm_start"
supervise warm_start "$run_dir/model"
warm_start=$($python -m verl.run.last_checkpoint "$run_dir/warm_start")

say "reinforcement learning (metrics and trajectories in $run_dir/rl)"
once rl configs/ppo_trainer.yaml configs/smollm2.yaml "configs/$kind.yaml" "$run_dir/prompts" "$warm_start" -- "$run_dir/rl" \
  -m verl.trainer.main_ppo --config-name $kind actor_rollout_ref.model.path="$warm_start" retriever.url="$url" \
  data.train_files="$(quoted "$run_dir/prompts/train/train.parquet")" \
  data.val_files="$(quoted "$run_dir/prompts/validation/train.parquet")" trainer.seed="$seed" \
  trainer.default_local_dir="$run_dir/rl" trainer.experiment_name="$(basename "$run_dir")" trainer.resume_mode=auto \
  "${rl_size[@]}" "$@"

# As many steps of the warm start as took the time of RL's steps.
EQUAL_TIME='
import json, sys
warm, rl = ([json.loads(line) for line in open(f"{folder}/metrics.jsonl")] for folder in sys.argv[1:])
times = [row["time"] for row in warm if "sft/loss" in row]
rl_seconds = sum(row.get("timing_s/step", 0.0) for row in rl)
print(max(1, round(rl_seconds * (len(times) - 1) / (times[-1] - times[0]))))
'
steps=$($python -c "$EQUAL_TIME" "$run_dir/warm_start" "$run_dir/rl")
say "control: $steps more steps of the warm start, which take the time of RL -> $run_dir/control"
supervise control "$warm_start" trainer.total_training_steps="$steps" trainer.test_freq=10 trainer.save_freq=10 \
  trainer.max_ckpt_to_keep=1

# evaluate NAME RUN [--best]: the answers of its model to the questions that are held out.
evaluate() {
  local model sets
  model=$($python -m verl.run.last_checkpoint "${@:2}")
  mapfile -t sets < <(files_of test)
  once "evaluation_$1" "configs/$kind.yaml" "$run_dir/prompts/test" "$model" -- "$run_dir/evaluation/$1" \
    -m search_r1.evaluation --config-name $kind --model "$model" --retriever_url "$url" \
    --data "${sets[@]}" "${evaluation_size[@]}" --output_dir "$run_dir/evaluation/$1" --restart
}
compare() { $python -m search_r1.evaluation.compare --before "$run_dir/evaluation/$1" --after "$run_dir/evaluation/$2"; }

say "evaluation on the questions that are held out -> $run_dir/evaluation"
evaluate warm_start "$run_dir/warm_start"
evaluate control "$run_dir/control" --best
evaluate rl "$run_dir/rl" --best
stop_retriever

if [[ -n $dense ]]; then
  say "the same with a dense index -> $run_dir/index"
  once encoder search_r1/data/model.py -- "$run_dir/encoder" -m search_r1.data.model minilm --output_dir "$run_dir/encoder"
  once index search_r1/search/index_builder.py "$corpus" "$run_dir/encoder" -- "$run_dir/index" \
    -m search_r1.search.index_builder --retrieval_method minilm --model_path "$run_dir/encoder" --corpus_path "$corpus" \
    --save_dir "$run_dir/index" --num_threads "$(nproc)"
  INDEX_PATH=$run_dir/index/minilm_Flat.index RETRIEVER_NAME=minilm RETRIEVER_MODEL=$run_dir/encoder start_retriever "$corpus"
  evaluate rl_dense "$run_dir/rl" --best
  stop_retriever
fi

say "exact match: RL beside its warm start"
compare warm_start rl
say "exact match: RL beside the control, which had as much time"
compare control rl
if [[ -n $dense ]]; then
  say "exact match of RL: the dense retriever beside BM25"
  compare rl rl_dense
fi
trained=$($python -m verl.run.last_checkpoint "$run_dir/rl" --best)
echo
echo "Trained model: $trained"
echo "Look at its answers: .venv/bin/search-r1 view $(printf '%q' "$run_dir/evaluation/rl")"
