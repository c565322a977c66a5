#!/usr/bin/env bash
# Makes the virtual environments of the benchmarks in target/peers; PEERS=1 with what they compare.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=${BENCH_BUILD_DIR:-target/peers}
mkdir -p "$folder"

# environment NAME PIP_ARGUMENTS...
environment() {
  local venv=$folder/venv-$1
  shift
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
  "$venv/bin/python" -c 'import numpy' 2>/dev/null || "$venv/bin/pip" install --quiet numpy==2.3.5
  if (($#)); then "$venv/bin/pip" install --quiet "$@"; fi
}

environment bench
[[ -n ${PEERS:-} ]] || exit 0
# nixl-cu12 declares torch, which it needs for tensors only.
environment nixl --no-deps nixl-cu12==1.5.1
environment mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1

# What their wheels link to (names of Debian 12).
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
