#!/usr/bin/env bash
# Makes an environment of its own for OpenEnv, whose requirements exclude ours, and in it the environment that
# `openenv init` makes: it says what it is told, and rewards its length.
#   bash example/openenv/setup.sh [DIR]     (default: .venv-openenv, 0.4 GB)
# Then start it:
#   cd .venv-openenv/echo_env && ../bin/python -m uvicorn server.app:app --port 8010
set -euo pipefail
dir=${1:-.venv-openenv}
python=$(command -v python3.11 || command -v python3)
[[ -x $dir/bin/python ]] || "$python" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet openenv==0.10.0
if [[ ! -d $dir/echo_env ]]; then
  (cd "$dir" && bin/python -m openenv.cli init echo_env)
fi
echo "OpenEnv is in $dir, and an environment of it in $dir/echo_env"
