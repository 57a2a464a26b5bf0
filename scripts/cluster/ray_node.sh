#!/usr/bin/env bash
# Make this machine a node of a Ray cluster, and stay until the cluster or this command is ended.
#   bash scripts/cluster/ray_node.sh head              the first node; the others join it at ITS_ADDRESS:6379
#   bash scripts/cluster/ray_node.sh 10.0.0.1:6379     every other node
# Further arguments go to `ray start`.
#   RAY_AUTH_TOKEN   the same secret on all nodes and where runs are started; without it the nodes read ~/.ray/auth_token
#                    (a home that they share, or `ray get-auth-token --generate` and a copy for each)
#   RAY_NODE_IP      this node's address on the network of the cluster, where Ray would take another
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "error: $*" >&2; exit 2; }
own_address() { hostname -I | awk '{ print $1 }'; }

[[ $# -gt 0 ]] || fail "say head, or the address of the head, such as 10.0.0.1:6379; see the first lines of this script"
role=$1
shift
if [[ $role == head ]]; then
  where=(--head --port=6379)
  # Jobs come from other machines too. Without a secret the job server keeps to this one.
  if [[ ${RAY_AUTH_MODE:-token} == token ]]; then where+=(--dashboard-host="${RAY_NODE_IP:-$(own_address)}"); fi
elif [[ $role =~ ^[^[:space:]]+:[0-9]+$ ]]; then
  where=(--address="$role")
else
  fail "'$role' is neither head nor an address with a port, such as 10.0.0.1:6379"
fi

# Whoever reaches Ray's ports runs code as this user: the nodes ask for a secret.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
if [[ $RAY_AUTH_MODE == token && -z ${RAY_AUTH_TOKEN:-} && ! -s ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]]; then
  fail "there is no token: set RAY_AUTH_TOKEN to the same secret on all nodes, or make one by" \
    ".venv/bin/ray get-auth-token --generate and copy ~/.ray/auth_token to the other nodes"
fi
# Ray's own choice, 15, leaves trainers and engines a thirtieth of a core beside whatever else is busy.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
# Each role has processes of its own: a process per core, started in advance, would serve nobody.
export RAY_prestart_worker_first_driver=${RAY_prestart_worker_first_driver:-0}
# A job that is stopped (`ray job stop`) finishes its step; Ray's own 3 seconds are not enough.
export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-900}
ulimit -n "$(ulimit -Hn)" # connections between all nodes, engines and trajectories

if [[ -n ${RAY_NODE_IP:-} ]]; then where+=(--node-ip-address="$RAY_NODE_IP"); fi
unset RAY_ADDRESS # which `ray start` would take for the cluster to join
ray=(ray)
if [[ -x .venv/bin/ray ]]; then
  ray=(.venv/bin/ray)
  # Ray starts processes by a line of bash in which it does not quote the interpreter's path: where that has a space, it
  # gets another path, which is there as long as this process.
  if [[ $(printf %q "$PWD") != "$PWD" ]]; then ray=("/proc/$$/cwd/.venv/bin/python" .venv/bin/ray); fi
fi
exec "${ray[@]}" start --block --disable-usage-stats "${where[@]}" "$@"
