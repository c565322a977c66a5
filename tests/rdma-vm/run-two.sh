#!/usr/bin/env bash
# run-two.sh [-t SECONDS] PROGRAM [ARGUMENT...]
# Two machines joined by a virtual Ethernet, with the device rxe0 each, run PROGRAM at the same time
# with FERRY_TEST_HOST=a (10.9.0.1) and b (10.9.0.2); output lines are prefixed. Exit code: 0 if both
# ended with 0, else the first other one. POWER_CUT_B=WORDS: machine b is killed when its output has
# these words, and only a's code counts.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
seconds=150
while getopts t: option; do
  case $option in t) seconds=$OPTARG ;; *) exit 125 ;; esac
done
shift $((OPTIND - 1))
sockets=$(mktemp -d "${TMPDIR:-/tmp}/rdma-vm-two.XXXXXX")
trap 'kill $(jobs -p) 2>/dev/null; wait; rm -rf "$sockets"' EXIT

machine() { # NAME PEER ADDRESS MAC PROGRAM [ARGUMENT...]
  local name=$1 peer=$2 address=$3 mac=$4
  shift 4
  export VM_PID_FILE=$sockets/$name.pid
  export VM_QEMU_ARGUMENTS="-netdev dgram,id=wire,local.type=unix,local.path=$sockets/$name.socket,remote.type=unix,remote.path=$sockets/$peer.socket -device virtio-net-pci,netdev=wire,mac=$mac,romfile="
  exec "$here/run.sh" -c 1 -m 1G -t "$seconds" -n eth -e "VM_ADDRESS=$address" -e "FERRY_TEST_HOST=$name" "$@" \
    > >(sed -u "s/^/$name| /" | tee "$sockets/$name.log") 2>&1
}
machine a b 10.9.0.1 52:54:00:09:00:01 "$@" &
first=$!
machine b a 10.9.0.2 52:54:00:09:00:02 "$@" &
second=$!
if [[ -n ${POWER_CUT_B:-} ]]; then
  until grep -qsF "$POWER_CUT_B" "$sockets/b.log"; do
    kill -0 "$second" 2>/dev/null || { echo "run-two: b ended without \"$POWER_CUT_B\"" >&2; exit 125; }
    sleep 0.02
  done
  kill -9 "$(cat "$sockets/b.pid")"
  echo "run-two: the power of machine b was cut"
fi
wait "$first"
code_a=$?
wait "$second"
code_b=$?
echo "run-two: a ended with $code_a, b with $code_b"
[[ $code_a == 0 ]] || exit $code_a
[[ -z ${POWER_CUT_B:-} ]] || exit 0
exit $code_b
