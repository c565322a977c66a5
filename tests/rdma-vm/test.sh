#!/usr/bin/env bash
# Builds with the feature rdma and runs its tests in virtual machines; `make test-rdma` calls it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
cargo=${CARGO:-cargo}

# test_binary PACKAGE TEST: builds a test and prints where it is.
test_binary() {
  "$cargo" test --locked --package "$1" --features rdma --test "$2" --no-run --message-format=json |
    python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == sys.argv[1]:
        print(message["executable"])
' "$2"
}

engine_tests=$(test_binary io-engine it)

# It starts where no libibverbs is, because it does not name it.
if ldd "$engine_tests" | grep -q verbs; then
  echo "$engine_tests needs libibverbs to start" >&2
  exit 1
fi

echo "== every test of the io engine that is about all transports, over rdma =="
"$here/run.sh" -n lo -t 300 -e FERRY_TEST_TRANSPORT=rdma "$engine_tests" --test-threads 2
