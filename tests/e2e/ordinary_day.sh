# What an ordinary user types on the first day, in a clone. Set by the test: DAY, a folder of the user's own, and PORT.
set -euo pipefail
say() { printf '\n== %s\n' "$*"; }
run="$DAY/my run é"
url="http://127.0.0.1:$PORT/retrieve"

say "quickstart, interrupted"
status=0
set -m # a command of its own group heeds Ctrl-C
bash scripts/quickstart.sh --small --output_dir "$run" -- trainer.total_training_steps=12 &
job=$!
until [[ -d "$run/rl/state/global_step_2" ]]; do kill -0 $job; sleep 0.2; done
kill -INT -- -$job
wait $job || status=$?
echo "ended with $status"
set +m

say "quickstart, resumed"
resumed="$DAY/resumed.log"
bash scripts/quickstart.sh --small --output_dir "$run" -- trainer.total_training_steps=12 trainer.resume_mode=auto 2>&1 |
  tee "$resumed"

say "infer, as a run prints it"
sed -n 's/^  a question *//p' "$resumed" >"$DAY/printed.sh"
cat "$DAY/printed.sh"
bash "$DAY/printed.sh" || [[ $? == 3 ]] # no answer: a policy that has learned nothing

say "view"
.venv/bin/search-r1 view "$run" --port "$VIEW_PORT" &
viewer=$!
until curl --noproxy "*" -sf "http://127.0.0.1:$VIEW_PORT/" >/dev/null; do kill -0 $viewer; sleep 0.2; done
kill $viewer
wait $viewer || true

say "documents"
.venv/bin/search-r1 data documents "$DAY/my papers" --output "$DAY/corpus.jsonl" ||
  [[ $? == 3 ]] # one file cannot be read
.venv/bin/python -m search_r1.search.index_builder --retrieval_method bm25 --corpus_path "$DAY/corpus.jsonl" --save_dir "$DAY/index"
.venv/bin/python -m search_r1.search.retrieval_server --retriever_name bm25 --corpus_path "$DAY/corpus.jsonl" \
  --index_path "$DAY/index/bm25" --port "$PORT" &
server=$!
until curl --noproxy "*" -sf "http://127.0.0.1:$PORT/readyz" >/dev/null; do kill -0 $server; sleep 0.2; done

say "questions about them"
curl --noproxy "*" -sf "$url" -H "Content-Type: application/json" -d '{"queries": ["How wide is the harbour of Skarn?"], "topk": 1}'
.venv/bin/search-r1 infer --run "$run/rl" --retriever_url "$url" --question "How wide is the harbour of Skarn?" || [[ $? == 3 ]]
kill $server
wait $server || true
say "done"
