#!/usr/bin/env bash
# Set up, then every check of the project: style, types, walls, tests. Arguments go to pytest:
#   bash scripts/test.sh                                  the default tests: all but those that take minutes
#   bash scripts/test.sh --all                            all tests, with more random examples: before a release
#   bash scripts/test.sh --ci                             the default ones, then slow ones until 45 minutes have passed
#   bash scripts/test.sh tests/verl/algorithms -k kl      some
#   bash scripts/test.sh -m slow                          those that take minutes
#   bash scripts/test.sh --gpu                            in the environment of an NVIDIA machine
# All checks run even when one fails; the exit status is 0 only if every one passed. CONTRIBUTING.md says which test
# belongs where. As root on Debian or Ubuntu it installs Chromium, in which the viewer's page is tested.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
began=$(date +%s)
CI_MINUTES=45 # after which no more slow test begins: the longest takes 20, and one that fails runs once more

# One thread a process: tests start several processes each, and more threads than cores make all of them slow.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
# Hundreds of processes start: each would compile the same files.
unset PYTHONDONTWRITEBYTECODE
# Nothing here may need the network.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0

setup=() ci="" which=(-m "not slow")
while [[ $# -gt 0 ]]; do
  case $1 in
    --gpu) setup=(--gpu) ;;
    --all) which=(--hypothesis-profile large) ;;
    --ci) ci=yes ;;
    *) break ;;
  esac
  shift
done

failed=()
check() { # check NAME COMMAND...
  printf '\n== %s\n' "$1"
  local name=$1 started=$SECONDS
  shift
  "$@" || failed+=("$name")
  printf '== %s: %d s\n' "$name" "$((SECONDS - started))"
}

has_chromium() { command -v chromium chromium-browser google-chrome >/dev/null; }

install_chromium() {
  if has_chromium || [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then return; fi
  echo "chromium, for the tests of the viewer's page"
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium
} >&2

# mypy's workers give up (status 2) where the machine is so busy that they start slowly; alone it needs none.
types() {
  local status=0
  "$bin/python" -m mypy -n 2 || status=$?
  if ((status != 2)); then return "$status"; fi
  "$bin/python" -m mypy
}

# As many processes as cores, at least two (tests/helpers/tiers.py), the tests of a file in one of them. A test that
# fails is tried once more, with nothing beside it: it may have waited too long for a core. Where several fail again,
# the rest is left out.
tests() { # tests ARGUMENT..., those of the array `once` only for the first time
  local status=0
  "$bin/python" -m pytest -n auto --dist loadfile --no-loadscope-reorder "${once[@]}" "$@" || status=$?
  if ((status != 1)); then return "$status"; fi
  printf '\n== once more, alone\n'
  "$bin/python" -m pytest "$@" --last-failed --last-failed-no-failures none --maxfail=3
}

printf '== set-up\n'
bash scripts/setup.sh "${setup[@]}"
bin=.venv/bin
install_chromium >/dev/null || true # without it those tests are skipped, which the last line of pytest says
check "style: ruff check" "$bin/ruff" check .
check "style: ruff format" "$bin/ruff" format --check .
check "types: mypy" types
check "walls: import-linter" "$bin/lint-imports" --no-cache
once=(--durations=15)
check "tests: pytest" tests "${which[@]}" "$@"
if [[ $ci ]]; then
  check "Chromium is there" has_chromium
  # Each day begins with another third of them.
  once=(--day "$((began / 86400))" --until "$((began + CI_MINUTES * 60))")
  check "tests: slow" tests -m slow
fi

printf '\n== total: %d s\n' "$SECONDS"
if ((${#failed[@]})); then
  printf '== FAILED: %s\n' "${failed[@]}" >&2
  exit 1
fi
