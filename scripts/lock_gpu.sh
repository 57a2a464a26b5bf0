#!/usr/bin/env bash
# Resolve requirements/gpu.lock, the one list for NVIDIA machines (Linux x86-64), for every Python of setup.py at once.
#   bash scripts/lock_gpu.sh            write it anew; pins that still fit are kept
#   bash scripts/lock_gpu.sh --check    does it resolve on all of them, complete and as it stands?
# Needs a network for the package index, and no GPU: what is downloaded is metadata. UV names the uv to use; without it
# one is installed into a temporary environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

lock=requirements/gpu.lock
uv_version=0.13.9

fail() { echo "lock_gpu: error: $*" >&2; exit 1; }

check=no
case "${1:-}" in
  "") ;;
  --check) check=yes ;;
  --help | -h) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) fail "unknown option '$1'; usage: bash scripts/lock_gpu.sh [--check]" ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

find_uv() {
  if [[ -n "${UV:-}" ]]; then echo "$UV"; return; fi
  if command -v uv; then return; fi
  python3 -m venv "$scratch/uv" && "$scratch/uv/bin/python" -m pip install --quiet "uv==$uv_version" >&2 || return 1
  echo "$scratch/uv/bin/uv"
}
uv=$(find_uv) || fail "uv could not be installed; install it yourself or name it in UV"

# What a GPU machine needs, by name; and what the metadata of those packages leaves open.
python3 - "$scratch" <<'PY'
import pathlib, runpy, sys
setup, folder = runpy.run_path("setup.py"), pathlib.Path(sys.argv[1])
(folder / "needed.in").write_text("\n".join([*setup["REQUIRED"], *setup["EXTRAS"]["gpu"], *setup["EXTRAS"]["liger"]]) + "\n")
# 12.x has modules of its own that lie over those of cuda-bindings 13
(folder / "limits.txt").write_text("cuda-python>=13\n")
PY

# resolve PYTHON_VERSION LIST: pins that are in LIST and fit are kept
resolve() {
  "$uv" pip compile --quiet --python-platform x86_64-manylinux_2_28 --python-version "$1" --no-header --no-annotate \
    --constraints requirements/dev.lock --constraints "$scratch/limits.txt" --output-file "$2" \
    "$scratch/needed.in" >/dev/null || fail "the list does not resolve on Python $1 (see uv's message above)"
}

# Each resolution starts from the one before it, so that they agree wherever they can.
pythons=(3.11 3.12 3.13)
list=$scratch/gpu.lock
grep -v '^#' "$lock" >"$list"
for python in 3.13 3.12 "${pythons[@]}"; do
  resolve "$python" "$list"
  cp "$list" "$scratch/$python"
done
{ grep '^#' "$lock"; LC_ALL=C sort -u -f "${pythons[@]/#/$scratch/}"; } >"$scratch/new"
twice=$(sed -n 's/==.*//p' "$scratch/new" | sort | uniq -d | tr '\n' ' ')
[[ -z $twice ]] || fail "Python ${pythons[*]} need different versions of: $twice"

if [[ $check == yes ]]; then
  diff "$lock" "$scratch/new" || fail "$lock is not what its packages need; write it anew: bash scripts/lock_gpu.sh"
  echo "lock_gpu: $lock resolves on Python ${pythons[*]}: $(grep -c == "$lock") packages"
else
  cp "$scratch/new" "$lock"
  echo "lock_gpu: wrote $(grep -c == "$lock") packages to $lock"
fi
