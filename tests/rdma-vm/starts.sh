#!/usr/bin/env bash
# starts.sh FOLDER PYTHON
# Runs in a virtual machine without devices: the programs in FOLDER, and the wheel that PYTHON has,
# start there, first with libibverbs and then without, say which of the two is missing, and move
# bytes another way.
set -euo pipefail
programs=$1 python=$2
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
"$python" - <<'END'
import ferry.mori_compat.io as io

source, target = (io.IOEngine(key, io.IOEngineConfig("127.0.0.1", 0)) for key in "ab")
for engine in (source, target):
    engine.create_backend(io.BackendType.RDMA)
source.register_remote_engine(target.get_engine_desc())
sent, received = bytearray(range(256)) * 16, bytearray(4096)
local, remote = source.register_memory(sent), target.register_memory(received)
uid = source.allocate_transfer_uid()
status = source.write(local, 0, remote, 0, 4096, uid)
status.Wait()
assert status.Succeeded(), status.Message()
assert received == sent
print("the wheel moves bytes")
END
echo "without libibverbs everything but rdma works"
