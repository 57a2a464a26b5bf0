#!/usr/bin/env bash
# Keeps a training run going: starts COMMAND, and starts it again from its last saved state when it dies.
#   bash scripts/run_with_restart.sh -- bash train_grpo.sh trainer.default_local_dir=checkpoints/nq trainer.save_freq=20
#   --max_restarts N   then it is given up (10)
#   --backoff_s S      pause before the first restart; doubles with each, up to 10 minutes (30)
# COMMAND must set trainer.default_local_dir (or hydra.run.dir, hydra.sweep.dir): the states saved there, or one level
# down by the runs of a sweep (-m), show whether it gets anywhere.
# trainer.resume_mode=auto is added unless COMMAND sets it. docs/resume.md says what is restarted and what is not.
set -euo pipefail
set -m # COMMAND gets its own process group, and SIGINT is not ignored in it

MAX_BACKOFF_S=600
MAX_FRUITLESS=3
PAUSE_S=0.1

main() {
  local max_restarts=10 backoff_s=30 restarts=0 fruitless=0 before
  while (($#)); do
    case "$1" in
      --max_restarts) max_restarts=$(count "$1" "${2-}") || exit; shift 2 ;;
      --backoff_s) backoff_s=$(count "$1" "${2-}") || exit; shift 2 ;;
      --) shift; break ;;
      *) refuse "unknown argument $1; usage: run_with_restart.sh [--max_restarts N] [--backoff_s S] -- COMMAND ..." ;;
    esac
  done
  (($#)) || refuse "no command; give one after --"
  local key run_dir command=("$@")
  key=$(folder_key "$@") || exit
  run_dir=$(run_folder "$key" "$@") || exit
  command+=("$key=$run_dir") # absolute: the command may change its folder
  given trainer.resume_mode "$@" >/dev/null || command+=("trainer.resume_mode=auto")

  trap 'forward TERM' TERM
  trap 'forward INT' INT
  while :; do
    before=$(last_state "$run_dir")
    run "${command[@]}"
    if ((stopped)) || ! is_restarted "$status"; then exit "$status"; fi
    if [[ $(last_state "$run_dir") == "$before" ]]; then ((++fruitless)); else fruitless=0; fi
    if ((fruitless == MAX_FRUITLESS)); then
      give_up "$MAX_FRUITLESS starts in a row saved no new state, so another would not either" "$run_dir"
    fi
    ((restarts < max_restarts)) || give_up "$restarts restarts were allowed" "$run_dir"
    ((++restarts))
    say "exit status $status; restart $restarts of $max_restarts in $backoff_s s, last state: $(named "$run_dir")"
    rest "$backoff_s"
    backoff_s=$((2 * backoff_s < MAX_BACKOFF_S ? 2 * backoff_s : MAX_BACKOFF_S))
  done
}

say() { echo "run_with_restart: $*" >&2; }

refuse() { echo "error: $*" >&2; exit 2; }

give_up() { # give_up REASON RUN_FOLDER
  say "gave up after exit status $status: $1. Last state: $(named "$2"). See the error above, then start again."
  exit "$status"
}

count() { # count FLAG VALUE
  [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || refuse "$1 is '$2'; it must be a whole number from 0"
  echo "$2"
}

# given KEY ARGUMENT...: the value that the arguments give to KEY, where the last one wins.
given() {
  local key=$1 argument value found=1
  shift
  for argument in "$@"; do
    if [[ $argument =~ ^\+{0,2}"$key"=(.*)$ ]]; then value=${BASH_REMATCH[1]} found=0; fi
  done
  if ((found == 0)); then echo "$value"; fi
  return "$found"
}

# folder_key ARGUMENT...: by which of its names they give the run folder; the trainer refuses two.
folder_key() {
  local key
  for key in trainer.default_local_dir hydra.run.dir hydra.sweep.dir; do
    if given "$key" "$@" >/dev/null; then echo "$key"; return; fi
  done
  refuse "the command does not set trainer.default_local_dir=FOLDER"
}

run_folder() { # run_folder KEY ARGUMENT...
  local folder
  folder=$(given "$@")
  folder=${folder#[\'\"]}
  folder=${folder%[\'\"]}
  [[ -n $folder && $folder != *'${'* ]] || refuse "$1='$folder' must be the path itself"
  if is_sweep "$@" && [[ $folder =~ ,|^(choice|range)\( ]]; then
    refuse "$1='$folder' gives the runs of a sweep several folders, whose states are not looked for: name the one that" \
      "they are in, where each run has a folder of its own"
  fi
  if [[ $folder == "~" || $folder == "~/"* ]]; then folder=$HOME${folder#"~"}; fi
  if [[ $folder != /* ]]; then folder=$PWD/$folder; fi
  echo "$folder"
}

# is_sweep ARGUMENT...: whether one is the trainer's -m; python's is followed by the name of a module.
is_sweep() {
  while (($#)); do
    case "$1" in
      --multirun) return 0 ;;
      -m) if [[ -z ${2-} || $2 == *=* || $2 == -* ]]; then return 0; fi ;;
    esac
    shift
  done
  return 1
}

# The state written last, by time and path, of the run or of any run of a sweep; a state that is written again is a new
# one.
last_state() {
  local states=("$1/state" "$1"/*/state)
  find "${states[@]}" -path '*/global_step_*/manifest.json' -printf '%T@ %h\n' 2>/dev/null | sort -n | tail -1 || true
}

named() {
  local state
  state=$(last_state "$1")
  if [[ -n $state ]]; then echo "${state#* }"; else echo "none in $1"; fi
}

# 2, 126, 127: a setting or the command itself is wrong. 130: someone interrupted it.
is_restarted() {
  case "$1" in 0 | 2 | 126 | 127 | 130) return 1 ;; esac
}

child=0 stopped=0 interrupted=0 status=0

forward() {
  stopped=1 interrupted=1
  if ((child)); then kill -s "$1" "$child" 2>/dev/null || true; fi
}

# run COMMAND...: until it ends; `status` is its exit status.
run() {
  "$@" </dev/null &
  wait_for $!
  sweep
  child=0
}

# wait_for PROCESS: until it ends.
wait_for() {
  child=$1
  if ((stopped)); then kill "$child" 2>/dev/null || true; fi # the signal came before there was anyone to pass it on to
  while :; do
    interrupted=0
    status=0
    wait "$child" || status=$?
    ((interrupted)) || break # a signal to this script ends `wait`, not the child
  done
}

# What the command left in its process group would hold memory and ports that the next start needs.
sweep() {
  local i
  for ((i = 0; i < 100; i++)); do
    kill -0 -- "-$child" 2>/dev/null || return 0
    if ((i == 10)); then kill -TERM -- "-$child" 2>/dev/null || true; fi
    sleep "$PAUSE_S" || true
  done
  kill -KILL -- "-$child" 2>/dev/null || true
}

# rest SECONDS: ends at once when this script is told to stop.
rest() {
  sleep "$1" &
  wait_for $!
  child=0
  if ((stopped)); then exit "$status"; fi
}

main "$@"
