#!/usr/bin/env bash
# starts.sh FOLDER
# Runs in a virtual machine without devices: the programs in FOLDER start there, first with
# libibverbs and then without, say which of the two is missing, and move bytes another way.
set -euo pipefail
programs=$1
work=$(mktemp -d)

# starts WORDS: the service is ready, and has said why there is no rdma.
starts() {
  local words=$1 ready
  "$programs/transfer-actor" serve --attach-socket "$work/attach" --api-socket "$work/api" \
    --metrics-listen 127.0.0.1:0 > "$work/out" 2> "$work/log" &
  local service=$!
  for _ in $(seq 600); do
    if grep -q '^ready ' "$work/out"; then ready=yes; break; fi
    kill -0 "$service" || break
    sleep 0.1
  done
  kill "$service"
  wait "$service" || true
  [[ ${ready:-} == yes ]] || { echo "the service did not start:"; cat "$work/log"; return 1; }
  grep 'no rank will have the transport rdma' "$work/log" | grep -F "$words" || {
    echo "the service did not say \"$words\":"
    cat "$work/log"
    return 1
  }
}

ldconfig -p | grep libibverbs.so.1
starts "this host has no rdma device"
# The machine's layer over the host's files takes this.
rm -f /usr/lib/*/libibverbs.so* /usr/lib/*/librdmacm.so* /lib/*/libibverbs.so* /lib/*/librdmacm.so*
ldconfig
if ldconfig -p | grep -E 'verbs|rdmacm'; then exit 1; fi
starts "libibverbs cannot be opened"
"$programs/ferry-demo" --requests 2 --concurrency 2
if "$programs/ferry-demo" --requests 1 --concurrency 1 --transport rdma 2> "$work/log"; then exit 1; fi
grep 'no transport reaches engine .*(rdma: ' "$work/log"
echo "without libibverbs everything but rdma works"
