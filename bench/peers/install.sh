#!/usr/bin/env bash
# Makes the virtual environments of the benchmarks in target/peers; PEERS=1 with what they compare.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p target/peers
# nixl-cu12 declares torch, which it needs for tensors only.
for name in nixl mooncake; do
  venv=target/peers/venv-$name
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
  "$venv/bin/python" -c 'import numpy' 2>/dev/null || "$venv/bin/pip" install --quiet numpy==2.3.5
done
[[ -n ${PEERS:-} ]] || exit 0
target/peers/venv-nixl/bin/pip install --quiet --no-deps nixl-cu12==1.5.1
target/peers/venv-mooncake/bin/pip install --quiet mooncake-transfer-engine-non-cuda==0.3.13.post1
needed=(libibverbs1 librdmacm1 ibverbs-providers libnuma1 libgflags2.2 libgoogle-glog0v6 libjsoncpp25
  liburing2 libcurl4 libunwind8)
missing=()
for package in "${needed[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if ((${#missing[@]})); then
  if [[ $(id -u) == 0 ]]; then sudo=(); else sudo=(sudo); fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
