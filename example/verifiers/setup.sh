#!/usr/bin/env bash
# Makes an environment of its own for verifiers, whose requirements exclude ours (openai<3, mcp==2.0.0).
#   bash example/verifiers/setup.sh [DIR]     (default: .venv-verifiers, 0.4 GB)
set -euo pipefail
dir=${1:-.venv-verifiers}
python=$(command -v python3.11 || command -v python3)
[[ -x $dir/bin/python ]] || "$python" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet verifiers==0.4.0
echo "verifiers is in $dir"
