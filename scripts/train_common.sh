# Shared by train_*.sh, which source it: settings from the environment, settings of the run that all have in common, checks
# before anything starts, and the run itself.
# Expects EXPERIMENT_NAME_DEFAULT, DATA_DIR_DEFAULT and BASE_MODEL_DEFAULT. The run, its log, and modules of one's own (a
# reward, an environment) are in the folder that the script is called from.
#   DATA_DIR           folder with train.parquet and test.parquet
#   TRAIN_DATA_DIR, TEST_DATA_DIR   where the two are in different folders
#   BASE_MODEL         a Hugging Face name, or a folder with a saved model (an actor/global_step_N, say)
#   EXPERIMENT_NAME    names the run, its log and its checkpoint folder; by default as trainer.experiment_name or the last
#                      part of the run folder among the arguments, else after the published experiment
#   WAND_PROJECT       project at W&B (the published spelling; WANDB_PROJECT works too)
#   TRAINER            entry point; verl.trainer.main_ppo_format trains with the format reward, verl.trainer.preflight
#                      says whether these settings would start and fit, verl.trainer.dry_run what they take on GPUs,
#                      verl.trainer.plan which layout to take
#   N_GPUS             devices on this machine, or on each node (on a CPU machine: number of training processes)
# Those for several nodes (example/multinode) set N_NODES_DEFAULT too. A run on a Ray cluster (docs/multinode.md):
#   N_NODES            nodes that train
#   RAY_DASHBOARD_ADDRESS   http://HEAD:8265: the run is submitted there as a job, with the variables for its libraries
#   RAY_ADDRESS        HEAD:6379: without the former, the run is led from here; this machine is a node of the cluster
#   RUNTIME_ENV        of a job: a runtime environment of Ray, verl/trainer/runtime_env.yaml say, whose excludes alone say
#                      what stays behind; without one the nodes share the folder that the script is called from

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$ROOT/scripts/shell_common.sh"
# This checkout's packages, whatever lies in the caller's folder; then the caller's modules.
export PYTHONPATH=$ROOT:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1

# A relative path means the caller's folder first, then the repository.
locate() { if [[ ! -e $1 && -e $ROOT/$1 ]]; then echo "$ROOT/$1"; else echo "$1"; fi; }

DATA_DIR=$(locate "${DATA_DIR:-$DATA_DIR_DEFAULT}")
TRAIN_DATA_DIR=$(locate "${TRAIN_DATA_DIR:-$DATA_DIR}")
TEST_DATA_DIR=$(locate "${TEST_DATA_DIR:-$DATA_DIR}")
BASE_MODEL=$(locate "${BASE_MODEL:-$BASE_MODEL_DEFAULT}")

# value_of KEY ARGUMENT...: the value that the last argument which sets KEY gives it; nothing without one.
value_of() {
  local key=$1 argument value=""
  shift
  for argument in "$@"; do
    if [[ $argument =~ ^\+{0,2}"$key"=(.*)$ ]]; then value=${BASH_REMATCH[1]}; fi
  done
  value=${value#[\'\"]}
  echo "${value%[\'\"]}"
}

# given KEY ARGUMENT...: whether an argument sets KEY (then the default's file need not exist).
given() {
  local key=$1 argument
  shift
  for argument in "$@"; do
    if [[ $argument =~ ^\+{0,2}"$key"= ]]; then return 0; fi
  done
  return 1
}

# A run is named after its folder if the arguments give one: a script's default names the published experiment. Hydra's
# names of the folder (verl/config/loading/foreign.py) stand for ours; two of them are an error of the trainer's.
run_folder=$(value_of trainer.default_local_dir "$@")
for key in hydra.run.dir hydra.sweep.dir; do
  run_folder=${run_folder:-$(value_of "$key" "$@")}
done
run_name=$(value_of trainer.experiment_name "$@")
run_name=${run_name:-$(basename -- "${run_folder:-$EXPERIMENT_NAME_DEFAULT}")}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-${run_name//[^A-Za-z0-9._-]/_}}
WAND_PROJECT=${WAND_PROJECT:-${WANDB_PROJECT:-Search-R1}}
N_GPUS=${N_GPUS:-8}
N_NODES=${N_NODES:-${N_NODES_DEFAULT:-1}}
TRAINER=${TRAINER:-verl.trainer.main_ppo}

# Only for policies that write tags.
OF_TAGS=(agent.tags_in_thoughts=true)
if [[ $(value_of agent.format "$@") == chat ]]; then OF_TAGS=(); fi

# Only where the arguments do not give it by one of Hydra's names.
RUN_FOLDER=(trainer.default_local_dir="verl_checkpoints/$EXPERIMENT_NAME")
if given hydra.run.dir "$@" || given hydra.sweep.dir "$@"; then RUN_FOLDER=(); fi

# What the train scripts have in common. A script's own settings come behind these, and the user's behind those.
SHARED=(
  data.train_files="$(quoted "$TRAIN_DATA_DIR/train.parquet")"
  data.val_files="$(quoted "$TEST_DATA_DIR/test.parquet")"
  data.train_data_num=null
  data.val_data_num=null
  data.train_batch_size=512
  data.val_batch_size=256
  data.max_prompt_length=4096
  data.max_response_length=500
  data.max_start_length=2048
  data.max_obs_length=500
  data.shuffle_train_dataloader=True
  algorithm.no_think_rl=false
  "${OF_TAGS[@]}"
  actor_rollout_ref.model.path="$BASE_MODEL"
  actor_rollout_ref.model.enable_gradient_checkpointing=true
  actor_rollout_ref.model.use_remove_padding=True
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285
  actor_rollout_ref.actor.ppo_mini_batch_size=256
  actor_rollout_ref.actor.state_masking=true
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_micro_batch_size=64
  actor_rollout_ref.actor.fsdp_config.param_offload=true
  actor_rollout_ref.actor.fsdp_config.grad_offload=true
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
  actor_rollout_ref.ref.log_prob_micro_batch_size=128
  actor_rollout_ref.ref.fsdp_config.param_offload=True
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.temperature=1
  actor_rollout_ref.rollout.log_prob_micro_batch_size=128
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  retriever.url=http://127.0.0.1:8000/retrieve
  retriever.topk=3
  trainer.project_name="$WAND_PROJECT"
  trainer.experiment_name="$EXPERIMENT_NAME"
  "${RUN_FOLDER[@]}"
  trainer.default_hdfs_dir=null
  trainer.n_gpus_per_node="$N_GPUS"
  trainer.nnodes="$N_NODES"
  trainer.total_epochs=15
  trainer.total_training_steps=1005
  trainer.test_freq=50
  +trainer.val_only=false
)

PYTHON=python3
if [[ -x $ROOT/.venv/bin/python ]]; then PYTHON=$ROOT/.venv/bin/python; fi

# Only prints something: nothing has to exist for that.
only_prints() {
  local argument
  for argument in "$@"; do
    case "$argument" in --cfg | --cfg=* | -c | --info | --help | -h) return 0 ;; esac
  done
  return 1
}

check_settings() {
  if only_prints "$@"; then return 0; fi
  [[ $N_GPUS =~ ^[1-9][0-9]*$ ]] || fail "N_GPUS=$N_GPUS is not a number of devices, such as 1 or 8"
  [[ $N_NODES =~ ^[1-9][0-9]*$ ]] || fail "N_NODES=$N_NODES is not a number of nodes, such as 4"
  [[ $TRAINER =~ ^verl\.trainer\.(main_ppo|main_ppo_format|preflight|dry_run|plan)$ ]] ||
    fail "TRAINER=$TRAINER is not verl.trainer.main_ppo, verl.trainer.main_ppo_format, verl.trainer.preflight," \
      "verl.trainer.dry_run or verl.trainer.plan"
  [[ $EXPERIMENT_NAME =~ ^[A-Za-z0-9._-]+$ ]] ||
    fail "EXPERIMENT_NAME='$EXPERIMENT_NAME' names a file and a folder: use letters, digits and . _ - only"
  given data.train_files "$@" || require_prompts "$TRAIN_DATA_DIR/train.parquet" "TRAIN_DATA_DIR or DATA_DIR"
  given data.val_files "$@" || require_prompts "$TEST_DATA_DIR/test.parquet" "TEST_DATA_DIR or DATA_DIR"
  given actor_rollout_ref.model.path "$@" || require_model
}

require_prompts() { # require_prompts FILE VARIABLES
  [[ -f $1 ]] || fail "prompt file $1 does not exist; set $2 to the folder that holds ${1##*/}" \
    "(README: data), or make TinyWiki's by bash scripts/quickstart.sh"
}

require_model() {
  case "$BASE_MODEL" in
    /* | ./* | ../* | *global_step_*)
      [[ -f $BASE_MODEL/config.json ]] ||
        fail "BASE_MODEL=$BASE_MODEL is not a folder with a saved model (no config.json in it);" \
          "set it to such a folder or to a Hugging Face name like Qwen/Qwen2.5-3B"
      ;;
  esac
}

# train OVERRIDE... -- ARGUMENT...: what the user passed comes last, so it wins. The exit status is the trainer's.
train() {
  local overrides=()
  while [[ $1 != -- ]]; do
    overrides+=("$1")
    shift
  done
  shift
  # A script that sources another one says by a further -- where its own settings end.
  local argument
  for argument in "$@"; do
    if [[ $argument == -- ]]; then
      while [[ $1 != -- ]]; do
        overrides+=("$1")
        shift
      done
      shift
      break
    fi
  done
  # The planner may change a script's settings, and keeps the user's: it is told where those begin.
  if [[ $TRAINER == verl.trainer.plan ]]; then overrides+=(--); fi
  local command=("$PYTHON" -m "$TRAINER" "${overrides[@]}" "$@")
  if only_prints "$@" || [[ $TRAINER =~ (preflight|dry_run|plan)$ ]]; then exec "${command[@]}"; fi # leaves the log alone
  if [[ -n ${RAY_DASHBOARD_ADDRESS:-} ]]; then submit "${command[@]}"; fi
  [[ $N_NODES == 1 || -n ${RAY_ADDRESS:-} ]] ||
    fail "no Ray cluster is named: start one (docs/multinode.md), then set RAY_DASHBOARD_ADDRESS=http://HEAD:8265 to" \
      "submit a job, or RAY_ADDRESS=HEAD:6379 to lead the run from here"
  # exec, not a pipe: signals reach the trainer itself. tee, which ends with it, must survive a signal to all processes
  # of the run, or the run would end at its next line. The log of an earlier run is added to: this one may resume it, or
  # be refused.
  export PYTHONUNBUFFERED=1
  exec "${command[@]}" > >(trap '' INT TERM HUP; exec tee -a "$EXPERIMENT_NAME.log") 2>&1
}

# The variables that a driver passes on to its workers, and those that are for itself. No secrets: Ray shows a job's
# command to all who see its dashboard.
FOR_THE_DRIVER='
import os, shlex
from verl.process.ranks import WORKING_DIR, variables_of_driver
from verl.process.secrets import SECRET_KEY
given = variables_of_driver()
del given[WORKING_DIR]
for name, value in os.environ.items():
    if name == "VERL_WORKER_LOGS" or name.startswith("WANDB_") and not SECRET_KEY.search(name):
        given[name] = value
print(shlex.join(f"{name}={value}" for name, value in sorted(given.items())))
'

# submit COMMAND...: as a job of the Ray cluster, which runs it on its head and keeps what it prints.
submit() {
  local ray=ray job options=() variables place=(-C "$PWD" "PYTHONPATH=$PYTHONPATH" PYTHONSAFEPATH=1)
  if [[ -x $ROOT/.venv/bin/ray ]]; then ray=$ROOT/.venv/bin/ray; fi
  job=$EXPERIMENT_NAME-$(date +%Y-%m-%d_%H-%M-%S)
  if [[ -n ${RUNTIME_ENV:-} ]]; then # the folder goes along, and the job starts in a copy of it
    options=(--runtime-env="$RUNTIME_ENV")
    export RAY_RUNTIME_ENV_IGNORE_GITIGNORE=${RAY_RUNTIME_ENV_IGNORE_GITIGNORE:-1} # a user's modules go along
    place=()
    set -- python3 "${@:2}"
  fi
  variables=$("$PYTHON" -c "$FOR_THE_DRIVER")
  eval "place+=($variables)"
  unset RAY_ADDRESS RAY_API_SERVER_ADDRESS # either would win over --address
  "$ray" job submit --address="$RAY_DASHBOARD_ADDRESS" --submission-id="$job" --no-wait "${options[@]}" \
    -- env "${place[@]}" PYTHONUNBUFFERED=1 "$@" ||
    fail "the job was not submitted; is Ray's head at $RAY_DASHBOARD_ADDRESS, and does it ask for a secret" \
      "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too)?"
  echo "submitted as $job. What it prints:" \
    "env -u RAY_ADDRESS $(printf %q "$ray") job logs --address=$RAY_DASHBOARD_ADDRESS --follow $job"
  exit 0
}
