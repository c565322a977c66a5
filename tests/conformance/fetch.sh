#!/usr/bin/env bash
# fetch.sh FOLDER VERSION...: unpacks SGLang's wheels of these versions, without what they depend
# on, as FOLDER/VERSION/sglang. A version that is there already is left alone.
#
# The modules run as they are; nothing of them is part of this project.
set -euo pipefail
folder=${1:?fetch.sh FOLDER VERSION...}
shift
python=${FERRY_PYTHON:-python3}

scratch_opt=
trap 'rm -rf "$scratch_opt"' EXIT
for version in "$@"; do
  [[ -d $folder/$version ]] && continue
  mkdir -p "$folder"
  scratch_opt=$(mktemp -d "$folder/.fetch-XXXXXX")
  # Early releases are pure Python, later ones carry extensions that nothing here imports.
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$scratch_opt" \
    --only-binary=:all: --implementation cp --python-version 3.11 --abi cp311 --abi abi3 --abi none \
    --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform any \
    "sglang==$version"
  # Only what the tests import: the sources of the runtime.
  "$python" - "$scratch_opt"/sglang-*.whl "$scratch_opt/unpacked" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = [n for n in wheel.namelist() if n.startswith("sglang/srt/") and n.endswith(".py")]
    wheel.extractall(sys.argv[2], names)
PYTHON
  # What stands under its final name is whole, whoever was interrupted.
  mv -T "$scratch_opt/unpacked" "$folder/$version"
  rm -rf "$scratch_opt"
done
