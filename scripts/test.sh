#!/usr/bin/env bash
# Set up, then every check of the project: style, types, walls, tests. Arguments go to pytest:
#   bash scripts/test.sh                                  all but the tests that take minutes
#   bash scripts/test.sh tests/verl/algorithms -k kl      some
#   bash scripts/test.sh -m slow                          those that take minutes
#   bash scripts/test.sh --gpu                            in the environment of an NVIDIA machine
# All checks run even when one fails; the exit status is 0 only if every one passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One thread a process: tests start several processes each, and more threads than cores make all of them slow.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
# Nothing here may need the network.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0

setup=()
if [[ ${1:-} == --gpu ]]; then
  setup=(--gpu)
  shift
fi

failed=()
check() { # check NAME COMMAND...
  printf '\n== %s\n' "$1"
  local name=$1 started=$SECONDS
  shift
  "$@" || failed+=("$name")
  printf '== %s: %d s\n' "$name" "$((SECONDS - started))"
}

printf '== set-up\n'
bash scripts/setup.sh "${setup[@]}"
bin=.venv/bin
check "style: ruff check" "$bin/ruff" check .
check "style: ruff format" "$bin/ruff" format --check .
check "types: mypy" "$bin/python" -m mypy
check "walls: import-linter" "$bin/lint-imports" --no-cache
# Two processes, the tests of a file in one of them: many spend half their time waiting.
check "tests: pytest" "$bin/python" -m pytest -m "not slow" --durations=15 -n 2 --dist loadfile --no-loadscope-reorder "$@"

printf '\n== total: %d s\n' "$SECONDS"
if ((${#failed[@]})); then
  printf '== FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
