#!/usr/bin/env bash
# The published training and test prompts: train.parquet (NQ, HotpotQA) and test.parquet (the seven sets).
#   WORK_DIR   where data/ is made (default: the repository)
#   DATA_DIR   where the two files go (default: $WORK_DIR/data/nq_hotpotqa_train)
# Arguments go to both scripts: bash scripts/nq_hotpotqa/data_process.sh --input_dir data/qa
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

WORK_DIR=${WORK_DIR:-$PWD}
DATA_DIR=${DATA_DIR:-$WORK_DIR/data/nq_hotpotqa_train}
PYTHON=python3
if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi

"$PYTHON" scripts/data_process/qa_search_train_merge.py --local_dir "$DATA_DIR" --data_sources nq,hotpotqa "$@"
"$PYTHON" scripts/data_process/qa_search_test_merge.py --local_dir "$DATA_DIR" \
  --data_sources nq,triviaqa,popqa,hotpotqa,2wikimultihopqa,musique,bamboogle "$@"
