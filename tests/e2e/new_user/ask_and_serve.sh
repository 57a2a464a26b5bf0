#!/usr/bin/env bash
# What comes after hour.sh, in the same folder and with the same settings: the trained policy is asked and served.
#   CLONE=~/search-r1 PORT=8000 SERVE_PORT=8001 bash ask_and_serve.sh
set -euo pipefail
python=$CLONE/.venv/bin/python
started=()
trap 'kill "${started[@]}" 2>/dev/null || true; wait' EXIT

say() { printf '\n== %s\n' "$*"; }
until_up() { until "$python" -c "import urllib.request; urllib.request.urlopen('$1', timeout=10)" 2>/dev/null; do sleep 0.2; done; }

CORPUS_PATH=corpus.jsonl PORT=$PORT bash "$CLONE/retrieval_launch.sh" >server.log 2>&1 &
started+=($!)
until_up "http://127.0.0.1:$PORT/readyz"

say "ask"
"$python" "$CLONE/infer.py" --run run --question "Who built Skarn Light?" || [[ $? == 3 ]] # 3: no answer

say "serve"
"$python" -m search_r1.serve --run run --port "$SERVE_PORT" >serve.log 2>&1 &
started+=($!)
until_up "http://127.0.0.1:$SERVE_PORT/v1/models"
"$python" - <<PY
import openai
client = openai.OpenAI(base_url="http://127.0.0.1:$SERVE_PORT/v1", api_key="none")
name = client.models.list().data[0].id
message = {"role": "user", "content": "Who built Skarn Light?"}
print("model", client.models.retrieve(name).id)
print("reply", repr(client.chat.completions.create(model=name, messages=[message]).choices[0].message.content))
PY
say "done"
