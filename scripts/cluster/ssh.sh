#!/usr/bin/env bash
# A Ray cluster on machines that ssh reaches, the first of which is the head. This folder is at the same path on all.
#   bash scripts/cluster/ssh.sh start node1 node2 node3     and stay; Ctrl-C ends the cluster
# Arguments behind -- go to `ray start` on every node.
#   RAY_AUTH_TOKEN   as in scripts/cluster/ray_node.sh
#   RAY_NODE_IP      the head's address on the network of the cluster, if its name means another one here
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
address=${RAY_NODE_IP:-}
of_head=()
if [[ $address ]]; then
  of_head=(env "RAY_NODE_IP=$address")
else
  address=$(getent ahostsv4 "${hosts[0]}" | awk 'NR == 1 { print $1 }') || true
  [[ -n $address ]] || fail "${hosts[0]} has no address"
  # As a machine's own name may be on it: the others would look for the head on themselves.
  [[ $address != 127.* ]] ||
    fail "${hosts[0]} is $address here, where no other node reaches it: set RAY_NODE_IP to its address on their network"
fi
unset RAY_NODE_IP # of the head alone

# The secret goes by standard input: arguments can be read by everyone on a machine.
on() { # on HOST ROLE ARGUMENT...
  local host=$1 command=()
  shift
  command=(bash "$repository/scripts/cluster/ray_node.sh" "$@")
  if [[ $1 == head ]]; then command=("${of_head[@]}" "${command[@]}"); fi
  # What is started there ends with its standard input, which is open as long as this script runs.
  ssh -o BatchMode=yes "$host" "
    read -r RAY_AUTH_TOKEN; if [[ -n \$RAY_AUTH_TOKEN ]]; then export RAY_AUTH_TOKEN; fi
    ${command[*]@Q} & node=\$!; trap 'kill \$node; wait \$node' EXIT TERM HUP; cat" \
    < <(echo "${RAY_AUTH_TOKEN:-}"; exec tail -f --pid=$$ /dev/null) &
}

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
on "${hosts[0]}" head "$@"
for host in "${hosts[@]:1}"; do on "$host" "$address:6379" "$@"; done
echo "the cluster's address: RAY_ADDRESS=$address:6379 (RAY_DASHBOARD_ADDRESS=http://$address:8265)"
wait
