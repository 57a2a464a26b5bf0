#!/usr/bin/env bash
# From nothing to a trained search agent on a CPU laptop: set up, make TinyWiki, warm-start a small policy, train it by
# GRPO with an EMA anchor against a real retrieval server, and ask it a question.
#   bash scripts/quickstart.sh [--long | --marathon | --chat] [--small] [--seed N] [--output_dir DIR] [-- key=value ...]
#   --long            3-hop questions too, and longer training
#   --marathon        questions of 8 to 12 hops in a window of a quarter of what they need: the policy has to sum up
#   --chat            a chat model that calls tools (search, open_page, calculator), instead of tags
#   --small           a rehearsal of all of it, much shorter, in which nothing is learned
#   --seed N          other worlds, other draws (0)
#   --gpu             on one NVIDIA GPU, in bfloat16 (never run by the tests)
#   --output_dir DIR  where everything goes (runs/tinywiki_default_seedN, or _long_, _marathon_, _chat_, _small_, ...)
#   -- key=value ...  overrides of the training config (docs/configuration.md)
# On 2 idle cores it takes 9 minutes (half of that where the CPU has AVX-512), with --long about 15, with --chat about 18
# with AVX-512, with --marathon 80 without, and the installation before the first run 2 to 5 more. Disk: about 0.1 GB for
# the run, 3 GB for the packages in .venv. Memory: 16 GB are plenty. No GPU needed, and no network once the packages are
# there.
# A folder that holds a run is left alone. Go on with it by -- trainer.resume_mode=auto, take another by --output_dir,
# or have the earlier one moved to archive/ in its folder by -- trainer.overwrite=archive. TinyWiki and the warm start are
# made again only if something that they depend on has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/phases_common.sh

kind="" size="" seed=0 run_dir="" setup=() data_size=() sft_size=() rl_size=()
# Two processes share each batch of the warm start, and each update: one would use one core. Both keep the whole model.
rl_on_device=(trainer.n_gpus_per_node=2 actor_rollout_ref.actor.fsdp_config.fsdp_size=1)
sft_on_device=(trainer.n_gpus_per_node=2)
given=("$@")
while [[ $# -gt 0 ]]; do
  case "$1" in
    --help | -h) sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --long | --marathon | --chat)
      [[ -z $kind || $kind == "${1#--}" ]] || fail "--$kind and $1 exclude each other; leave one out"
      kind=${1#--}
      shift
      ;;
    --small)
      size=small
      data_size=(--num_passages 600 --num_train 120 --num_test 40 --num_sft_rows 2000)
      sft_size=(trainer.total_training_steps=60 data.train_batch_size=16 optim.lr=3e-3) # so short: a higher rate
      rl_size=(
        data.train_batch_size=6 actor_rollout_ref.rollout.n_agent=4 actor_rollout_ref.actor.ppo_mini_batch_size=24
        data.val_data_num=32 trainer.total_training_steps=3 trainer.test_freq=2 trainer.save_freq=2
      )
      shift
      ;;
    --gpu)
      setup=(--gpu) sft_on_device=(trainer.device=cuda)
      rl_on_device=(trainer.device=cuda actor_rollout_ref.rollout.dtype=bfloat16)
      shift
      ;;
    --seed | --output_dir)
      [[ -n ${2-} ]] || fail "$1 needs a value; see --help"
      if [[ $1 == --seed ]]; then seed=$2; else run_dir=$2; fi
      shift 2
      ;;
    --) shift; break ;;
    *) fail "unknown option $1; see --help (what overrides the training config goes behind --)" ;;
  esac
done
[[ $seed =~ ^[0-9]+$ ]] || fail "--seed is '$seed'; it must be a whole number from 0"
[[ $kind == long && $size == small ]] && kind="" # the rehearsal has no longer questions
mode=$kind${kind:+${size:+_}}$size
mode=${mode:-default}
run_dir="${run_dir:-runs/tinywiki_${mode}_seed${seed}}"
suffix=${kind:+_$kind}
options=("${given[@]:0:${#given[@]}-$#}") overrides=("$@")
if [[ ${#options[@]} -gt 0 && ${options[-1]} == -- ]]; then unset 'options[-1]'; fi
# This command with another override, as it can be pasted into a shell.
this_with() { printf 'bash%s' "$(printf ' %q' scripts/quickstart.sh "${options[@]}" -- "${overrides[@]}" "$1")"; }

say "set-up"
bash scripts/setup.sh "${setup[@]}"
python=.venv/bin/python
# One thread a role and waiting threads that sleep: the roles share two cores, and spinning threads would fight for them.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

# Now, not when data and warm start have been made again.
$python -m verl.run.resuming --config-name "tinywiki$suffix" trainer.default_local_dir="$run_dir/rl" "$@" ||
  fail "here that is: $(this_with trainer.resume_mode=auto), --output_dir ANOTHER_FOLDER, or" \
    "$(this_with trainer.overwrite=archive)"

say "TinyWiki: a fictional encyclopedia and questions about it -> $run_dir/data"
once data search_r1/data/tinywiki search_r1/llm_agent/templates ${kind:+"configs/tinywiki$suffix.yaml"} -- "$run_dir/data" \
  -m search_r1.data.tinywiki --output_dir "$run_dir/data" --seed "$seed" ${kind:+--$kind} "${data_size[@]}"

say "warm start: language modelling, then imitation of an imperfect demonstrator -> $run_dir/sft"
once sft configs/sft.yaml configs/tinywiki_sft.yaml "configs/tinywiki_sft$suffix.yaml" verl/trainer/sft.py verl/data \
  verl/engine "$run_dir/data/sft.parquet" "$run_dir/data/policy_init" -- "$run_dir/sft" \
  -m verl.trainer.sft --config-name "tinywiki_sft$suffix" data.train_files="$(quoted "$run_dir/data/sft.parquet")" \
  model.path="$run_dir/data/policy_init" trainer.default_local_dir="$run_dir/sft" \
  trainer.overwrite=archive trainer.seed="$seed" "${sft_size[@]}" "${sft_on_device[@]}"
policy=$($python -m verl.run.last_checkpoint "$run_dir/sft")

say "retrieval server"
start_retriever "$run_dir/data/corpus.jsonl"

say "reinforcement learning (metrics and trajectories in $run_dir/rl)"
rl_started=$SECONDS
$python -m verl.trainer.main_ppo --config-name "tinywiki$suffix" data.train_files="$(quoted "$run_dir/data/train.parquet")" \
  data.val_files="$(quoted "$run_dir/data/validation.parquet")" data.test_files="$(quoted "$run_dir/data/test.parquet")" \
  actor_rollout_ref.model.path="$policy" retriever.url="$url" trainer.seed="$seed" \
  trainer.default_local_dir="$run_dir/rl" trainer.experiment_name="tinywiki_${mode}_seed${seed}" \
  "${rl_size[@]}" "${rl_on_device[@]}" "$@"
rl_seconds=$((SECONDS - rl_started))
trained=$($python -m verl.run.last_checkpoint "$run_dir/rl")

stop_retriever

ask=("$python" infer.py --run "$run_dir/rl" --question)
say "one question, answered by infer.py with the trained policy; it starts the run's retriever again"
question=$($python -m search_r1.evaluation.example_question "$run_dir/data/test.parquet")
"${ask[@]}" "$question" || [[ $? == 3 ]] # 3: no answer, as from a policy that has learned nothing

say "exact match on $run_dir/data/test.parquet (worlds never trained on), before and after RL"
$python -m verl.tracking.report "$run_dir/rl" --summary test
echo "RL took ${rl_seconds} s, everything $((SECONDS - started)) s. Report: $run_dir/rl/report.md"
echo "Trained model: $trained"
echo "To ask a question of your own: $(printf '%q ' "${ask[@]}")\"Who is ...?\""
