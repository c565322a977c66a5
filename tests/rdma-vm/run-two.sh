#!/usr/bin/env bash
# run-two.sh [-t SECONDS] PROGRAM [ARGUMENT...]
# Two machines, a (10.9.0.1) and b (10.9.0.2), joined by a virtual Ethernet, with the device rxe0
# each. Each runs PROGRAM with a or b before its arguments; output lines are prefixed. Exit code: 0
# if both ended with 0, else the first other one. POWER_CUT_B=SECONDS: machine b is killed then.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
seconds=150
while getopts t: option; do
  case $option in t) seconds=$OPTARG ;; *) exit 125 ;; esac
done
shift $((OPTIND - 1))
program=$1
shift
sockets=$(mktemp -d "${TMPDIR:-/tmp}/rdma-vm-two.XXXXXX")
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$sockets"' EXIT

machine() { # NAME PEER ADDRESS MAC ARGUMENT...
  local name=$1 peer=$2 address=$3 mac=$4
  shift 4
  export VM_PID_FILE=$sockets/$name.pid
  export VM_QEMU_ARGUMENTS="-netdev dgram,id=wire,local.type=unix,local.path=$sockets/$name.socket,remote.type=unix,remote.path=$sockets/$peer.socket -device virtio-net-pci,netdev=wire,mac=$mac,romfile="
  exec "$here/run.sh" -c 1 -m 1G -t "$seconds" -n eth -e "VM_ADDRESS=$address" "$program" "$name" "$@" \
    > >(sed -u "s/^/$name| /") 2>&1
}
machine a b 10.9.0.1 52:54:00:09:00:01 "$@" &
first=$!
machine b a 10.9.0.2 52:54:00:09:00:02 "$@" &
second=$!
if [[ -n ${POWER_CUT_B:-} ]]; then
  sleep "$POWER_CUT_B"
  kill -9 "$(cat "$sockets/b.pid")"
  echo "run-two: the power of machine b was cut"
fi
wait "$first"
code_a=$?
wait "$second"
code_b=$?
echo "run-two: a ended with $code_a, b with $code_b"
[[ $code_a == 0 ]] || exit $code_a
exit $code_b
