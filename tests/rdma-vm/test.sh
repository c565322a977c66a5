#!/usr/bin/env bash
# test.sh [STAGE]...
# Builds with the feature rdma and runs its tests in virtual machines; `make test-rdma` calls it.
# Without stages: all of them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
cargo=${CARGO:-cargo}
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
stages=(misuse start transports faults rails rooms cycles two demo sglang device)
[[ $# == 0 ]] || stages=("$@")

# All that is built here is built as one workspace: a package alone has other features of what it
# depends on, which would be compiled once more.
workspace=(--workspace --locked --features "demo/rdma,ferry-python/rdma,tests/rdma")
"$cargo" build "${workspace[@]}" --lib --bins --tests

# test_program PACKAGE OPTION...: builds its integration tests with these options; the path.
test_program() {
  local package=$1
  shift
  "$cargo" test "$@" --test it --no-run --message-format=json | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == "it":
        if message["manifest_path"].endswith(f"/{sys.argv[1]}/Cargo.toml"):
            print(message["executable"])
' "$package"
}
engine_tests=$(test_program io-engine "${workspace[@]}")

# passes COUNT COMMAND...: runs tests of the io engine; a filter that finds fewer of them is an error.
passes() {
  local least=$1 output
  shift
  output=$("$@" | tee -a /dev/stderr | sed -n 's/^.*test result: ok. \([0-9]*\) passed.*$/\1/p' | sort -n | head -1)
  (( ${output:-0} >= least )) || { echo "$least tests were to pass, not ${output:-0}" >&2; return 1; }
}

# They start where no libibverbs and no driver of devices is, because they name none and open it when
# it is needed.
stage_start() {
  local program module needed
  module=$("${FERRY_PYTHON:?}" -c 'import ferry._ferry; print(ferry._ferry.__file__)')
  for program in "$engine_tests" "$target"/debug/{transfer-actor,bootstrap-server,ferry-demo} "$module"; do
    needed=$(ldd "$program")
    grep -q 'libc\.so' <<< "$needed"
    if grep -iE 'verbs|rdmacm|mlx|cuda|hip|hsa|rocm' <<< "$needed"; then
      echo "$program needs this to start" >&2
      return 1
    fi
  done
  "$here/run.sh" -n none -t 200 "$here/starts.sh" "$target/debug" "$FERRY_PYTHON"
}

# What must not compile: work posted out of memory that nothing holds. Only an unstable rustdoc looks
# at which error it is.
stage_misuse() {
  passes 1 "$cargo" test --doc --locked --package io-engine --features rdma \
    --config "build.rustdoc='$here/rustdoc.sh'" misuse
}

# Every test that is about all transports, and those of rdma alone.
stage_transports() {
  passes 20 "$here/run.sh" -n lo -t 300 -e FERRY_TEST_TRANSPORT=rdma "$engine_tests" --test-threads 2
}

stage_faults() {
  passes 4 "$here/run.sh" -n veth -t 300 "$engine_tests" --ignored rdma_faults --test-threads 1
}

# Engines with two devices each, one of which loses its link.
stage_rails() {
  passes 3 "$here/run.sh" -n rails -t 200 "$engine_tests" --ignored rdma_rails --test-threads 1
}

# Not one of those that run by themselves: the tests of all transports under AddressSanitizer. With
# it a hundred sessions take longer to open in an emulated machine than a peer waits.
stage_asan() {
  local program
  export RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address
  program=$(test_program io-engine --locked --package io-engine --features rdma \
    --target "$(rustc -vV | sed -n 's/^host: //p')" --target-dir "$target/asan")
  unset RUSTC_BOOTSTRAP RUSTFLAGS
  # A driver is a library that no sanitizer was built into.
  "$cargo" build --locked --package device-stand-in
  cp "$target/debug/libdevice_stand_in.so" "$(dirname "$program")"
  passes 20 "$here/run.sh" -n lo -t 900 -e FERRY_TEST_TRANSPORT=rdma "$program" --test-threads 1 \
    --skip a_hundred_sessions_share_a_device
}

# How rooms between two services end.
stage_rooms() {
  local program
  program=$(test_program tests "${workspace[@]}")
  passes 9 "$here/run.sh" -n lo -t 300 "$program" --ignored service::lifecycle::rdma --test-threads 2
  passes 5 "$here/run.sh" -n veth -t 300 "$program" --ignored --nocapture service::rdma_links --test-threads 1
}

# Alone on a machine, whose objects it counts.
stage_cycles() {
  passes 2 "$here/run.sh" -n lo -t 400 "$engine_tests" --ignored --test-threads 1 --exact \
    rdma::ten_thousand_cycles_leave_no_verbs_object \
    rdma::a_region_beyond_a_limit_is_registered_in_slices_and_written_across_their_seams
}

# Two machines, each of which runs its side of a test; one of them loses its power in the second.
stage_two() {
  passes 1 "$here/run-two.sh" -t 150 "$engine_tests" --ignored --exact --nocapture \
    rdma_hosts::pages_cross_from_one_machine_to_the_other_and_back
  POWER_CUT_B="cut the power" passes 1 "$here/run-two.sh" -t 150 "$engine_tests" --ignored --exact --nocapture \
    rdma_hosts::a_peer_that_loses_its_power_fails_what_is_under_way_without_a_proof
}

# Device memory is that of the stand-in for a driver, which lets the kernel reach it by its address,
# as a module of a real driver does; soft-RoCE takes no dma-bufs.
on_device=(-e "FERRY_CUDA_LIBRARY=$target/debug/libdevice_stand_in.so" -e FERRY_STAND_IN=peer_memory=1)

# Ranks of two engines in processes of their own, TP 4 to 2, with pools of either kind; fails unless
# every byte is verified.
stage_demo() {
  local memory
  for memory in host device; do
    "$here/run.sh" -n lo -t 300 "${on_device[@]}" "$target/debug/ferry-demo" --transport rdma --memory $memory \
      --prefill-tp 4 --decode-tp 2 --requests 12 --concurrency 4 --request-timeout 200
  done
}

# in_ranks COUNT MEMORY OPTION...: runs tests between our ranks and SGLang's own classes, and between
# those over our Python module; all bytes move over rdma, in and out of that kind of memory. What has to
# be skipped is an error.
in_ranks() {
  local least=$1 memory=$2 program out
  shift 2
  program=$(test_program tests "${workspace[@]}")
  out=$(mktemp -d)
  # By `env`: a path is resolved, and that of the interpreter in a virtual environment is a link.
  passes "$least" "$here/run.sh" -n lo -m 6G -t 1500 -o "$out" "${on_device[@]}" -e FERRY_TEST_MEMORY="$memory" \
    -e FERRY_TEST_TRANSPORT=rdma -e "FERRY_PYTHON=${FERRY_PYTHON:?}" -e "FERRY_SGLANG=${FERRY_SGLANG:?}" \
    -e FERRY_SKIP_LOG=/run/out/skipped \
    env "$FERRY_PYTHON" tests/conformance/fork_server.py "$program" "$@"
  if [[ -s $out/skipped ]]; then cat "$out/skipped" >&2; return 1; fi
  rm -r "$out"
}

# The core of the requests with pools in host memory.
stage_sglang() {
  local names name tests=()
  names=({ours_to_sglang,sglang_to_ours,sglang_over_our_module}::{a_hybrid_request_in_two_chunks,a_prefix_hit}
    our_manager_to_itself::a_hybrid_request_in_two_chunks sglang_over_our_module::latent_kv_with_indexer_pages)
  for name in "${names[@]}"; do tests+=("conformance::requests::$name"); done
  in_ranks ${#names[@]} host --test-threads 2 --exact "${tests[@]}"
}

# All of them with pools in device memory, as `make test-device` runs them over the other transports.
stage_device() {
  in_ranks 190 device --test-threads 4 conformance:: --skip conformance::releases:: \
    --skip a_failed_write_of_sglang --skip a_decode_gives_up_while_sglang_writes
}

for stage in "${stages[@]}"; do
  echo "== $stage =="
  began=$SECONDS
  "stage_$stage"
  echo "== $stage: $((SECONDS - began)) s =="
done
