# Sourced by the scripts that start a retrieval server or build an index: they run from any folder.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# this checkout, whatever lies in the caller's folder
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
PYTHON=python3
if [[ -x $ROOT/.venv/bin/python ]]; then PYTHON=$ROOT/.venv/bin/python; fi

# A relative path means the caller's folder first, then the repository.
locate() { if [[ -n $1 && ! -e $1 && -e $ROOT/$1 ]]; then echo "$ROOT/$1"; else echo "$1"; fi; }

# require FLAG WHAT PATH HINT ARGUMENT...: end here when the path is missing, unless an argument gives another by FLAG.
require() {
  local flag=$1 what=$2 path=$3 hint=$4 argument
  shift 4
  if [[ -e $path ]]; then return; fi
  for argument in "$@"; do
    case $argument in --help | -h | "$flag" | "$flag="*) return ;; esac
  done
  echo "error: $what $path does not exist; $hint" >&2
  exit 2
}

# corpus_and_index NAME WHAT HINT ARGUMENT...: set corpus_file and index_file, by default in the folder file_path (the index
# as NAME there), and require both.
corpus_and_index() {
  local name=$1 what=$2 hint=$3
  shift 3
  file_path=$(locate "${file_path:-data}")
  index_file=$(locate "${index_file:-$file_path/$name}")
  corpus_file=$(locate "${corpus_file:-$file_path/wiki-18.jsonl}")
  require --corpus_path "corpus file" "$corpus_file" "set file_path to its folder, or corpus_file" "$@"
  require --index_path "$what" "$index_file" "set index_file, or build it: $hint" "$@"
}
