# Shared by the scripts that train from nothing in phases (scripts/quickstart.sh, scripts/recipes/), which source it.
# Expects run_dir, the folder of everything that they write, and python, once the set-up has made it.

source "$(dirname "${BASH_SOURCE[0]}")/shell_common.sh"

started=$SECONDS
say() { printf '\n\033[1m[%4ds] %s\033[0m\n' "$((SECONDS - started))" "$*"; }

# once NAME INPUT... -- RESULT COMMAND...: run a command of Python, which writes RESULT; not again while its command, its
# inputs and what it wrote are as they were when it was done.
once() {
  local name=$1 inputs=() result
  shift
  while [[ $1 != -- ]]; do inputs+=("$1"); shift; done
  result=$2
  shift 2
  local phase=("$run_dir/.finished/$name.json" --inputs "${inputs[@]}" --results "$result" -- "$@")
  if [[ -n $("$python" -m verl.run.finished_phase check "${phase[@]}") ]]; then
    echo "done before, and unchanged: skipped"
    return
  fi
  "$python" "$@"
  "$python" -m verl.run.finished_phase record "${phase[@]}"
}

# The port in a file, or another one if it is missing or taken: phases whose command names it are then as they were.
FREE_PORT='
import pathlib, socket, sys
file = pathlib.Path(sys.argv[1])
for port in [*([int(file.read_text())] if file.is_file() else []), 0]:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            continue
        port = tried.getsockname()[1]
        break
file.parent.mkdir(parents=True, exist_ok=True)
file.write_text(str(port))
print(port)
'

# Whether a server on this machine answers with success, by no proxy.
ANSWERS='
import http.client, sys, urllib.request
try:
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=10).close()
except (OSError, http.client.HTTPException):
    sys.exit(1)
'

# start_retriever CORPUS: serve it on a free port, to which url is set; until this script ends, or stop_retriever.
start_retriever() {
  local port own_session
  port=$("$python" -c "$FREE_PORT" "$run_dir/.finished/port")
  url="http://127.0.0.1:$port/retrieve"
  # In a session of its own: Ctrl-C is for the training, which finishes its step with it.
  own_session=$(command -v setsid || true)
  CORPUS_PATH="$1" PORT=$port $own_session bash retrieval_launch.sh >"$run_dir/retrieval.log" 2>&1 &
  server=$!
  trap 'kill "$server" 2>/dev/null || true' EXIT
  for _ in $(seq 120); do
    if "$python" -c "$ANSWERS" "http://127.0.0.1:$port/healthz"; then return; fi
    kill -0 "$server" 2>/dev/null || { cat "$run_dir/retrieval.log" >&2; exit 1; }
    sleep 0.5
  done
  fail "the retrieval server did not answer within a minute; its log is $run_dir/retrieval.log"
}

stop_retriever() {
  kill "$server" && wait "$server" || true
  trap - EXIT
}
