#!/usr/bin/env bash
# A Ray cluster on machines that ssh reaches, the first of which is the head. This folder is at the same path on all.
#   bash scripts/cluster/ssh.sh start node1 node2 node3     and stay; Ctrl-C ends the cluster
# Arguments behind -- go to `ray start` on every node.
# RAY_AUTH_TOKEN and RAY_NODE_IP: scripts/cluster/ray_node.sh.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }

[[ ${1:-} == start && $# -gt 1 ]] || fail "usage: bash scripts/cluster/ssh.sh start HEAD NODE... [-- ARGUMENT...]"
shift
hosts=()
while [[ $# -gt 0 && $1 != -- ]]; do
  hosts+=("$1")
  shift
done
if [[ ${1:-} == -- ]]; then shift; fi
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
address=$(getent ahostsv4 "${hosts[0]}" | awk 'NR == 1 { print $1 }')
[[ -n $address ]] || fail "${hosts[0]} has no address"

# The secret goes by standard input: arguments can be read by everyone on a machine.
on() { # on HOST ROLE ARGUMENT...
  local host=$1 command
  shift
  printf -v command '%q ' bash "$repository/scripts/cluster/ray_node.sh" "$@"
  # What is started there ends with its standard input, which this script holds open.
  ssh -o BatchMode=yes "$host" "
    read -r RAY_AUTH_TOKEN; if [[ -n \$RAY_AUTH_TOKEN ]]; then export RAY_AUTH_TOKEN; fi
    $command & node=\$!; trap 'kill \$node; wait \$node' EXIT TERM HUP; cat" \
    < <(echo "${RAY_AUTH_TOKEN:-}"; exec sleep infinity) &
}

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
on "${hosts[0]}" head "$@"
for host in "${hosts[@]:1}"; do on "$host" "$address:6379" "$@"; done
echo "the cluster's address: RAY_ADDRESS=$address:6379 (RAY_DASHBOARD_ADDRESS=http://$address:8265)"
wait
