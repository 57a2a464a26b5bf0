#!/usr/bin/env bash
# Fetch corpus, indexes and question sets: scripts/download.py with its arguments.
#   SAVE_PATH   the folder that everything goes to (default: data)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SAVE_PATH=${SAVE_PATH:-data}
PYTHON=python3
if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi

exec "$PYTHON" scripts/download.py --save_path "$SAVE_PATH" "$@"
