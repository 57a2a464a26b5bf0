#!/usr/bin/env bash
# The first run on a node of GPUs: eleven stages from "torch sees the GPU" to models of 3 and 7 billion random weights and
# the network between nodes, each PASS, FAIL or SKIP with its reason. The last line names the report, one file to attach
# to a question.
#   bash scripts/gpu/first_run.sh [--max_size tiny|3b|7b] [--stages 1-4] [--device cpu] [--output_dir DIR] [--scratch DIR]
#   RAY_ADDRESS=HEAD:6379 bash scripts/gpu/first_run.sh --stages 2,11 --nodes 2 [--min_gbs 10]   docs/multinode.md
# It uses the GPUs that CUDA_VISIBLE_DEVICES leaves, all of the node without it, and touches nobody's processes. Ctrl-C
# ends what it has started and keeps the report so far. --device cpu tries the stages themselves where there is no GPU.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
case "${1:-}" in --help | -h) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;; esac
python=python3
if [[ -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
export PYTHONPATH=$root/scripts/gpu:$root/scripts/experiments:$root${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
exec "$python" -m first_run "$@"
