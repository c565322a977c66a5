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
  "$python" -m zipfile --extract "$scratch_opt"/sglang-*.whl "$scratch_opt/unpacked"
  # What stands under its final name is whole, whoever was interrupted.
  mv -T "$scratch_opt/unpacked" "$folder/$version"
  rm -rf "$scratch_opt"
done
