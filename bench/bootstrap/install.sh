#!/usr/bin/env bash
# Puts what `make bench-bootstrap` compares with into target/bench-bootstrap: SGLang 0.5.23's wheel,
# unpacked, and a Python 3.11 with what its bootstrap server imports; and wrk by apt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=${BENCH_BUILD_DIR:-target/bench-bootstrap}
mkdir -p "$folder"

if ! command -v wrk >/dev/null; then
  if [[ $(id -u) == 0 ]]; then sudo=(); else sudo=(sudo); fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -y -qq --no-install-recommends wrk
fi
command -v python3.11 >/dev/null || {
  echo "python3.11 is missing: SGLang's wheel has a library for it; install it, then run this again"
  exit 1
}
if [[ ! -f $folder/venv/ready ]]; then
  python3.11 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check -r bench/bootstrap/requirements.txt
  touch "$folder/venv/ready"
fi
if [[ ! -f $folder/wheel/ready ]]; then
  "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.11 --implementation cp --abi cp311 --platform manylinux_2_34_x86_64 \
    --dest "$folder/download" sglang==0.5.23
  "$folder/venv/bin/python" -m zipfile -e "$folder"/download/sglang-*.whl "$folder/wheel"
  touch "$folder/wheel/ready"
fi
