# Two commands do everything: `make demo` and `make test`. Each installs what it needs.
# Requires Rust (rustup; the toolchain is pinned in rust-toolchain.toml) and, on Debian, apt.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
VENV := target/venv
WHEEL_PROFILE ?= dev
# SGLang's releases, unpacked: its own classes are the other side of the conformance tests.
export FERRY_SGLANG := $(abspath target)/sglang
SGLANG_RELEASE := 0.5.23
# One of each row of the table of the wire; the first is refused.
SGLANG_OLDER := 0.5.12 0.5.13.post1 0.5.18 0.5.19 0.5.21 0.5.22
export SGLCONF_SGLANG := $(FERRY_SGLANG)/$(SGLANG_RELEASE)/sglang
export FERRY_PYTHON := $(abspath $(VENV))/bin/python
BENCH_PYTHON := target/peers/venv-bench/bin/python
export BENCH_DRIVER := $(abspath $(or $(CARGO_TARGET_DIR),target))/release/bench-driver
export FERRY_SKIP_LOG := $(abspath target)/skipped.log

# Runs a command whose tests get ranks of SGLang by fork, instead of an interpreter for each.
WITH_RANKS := $(FERRY_PYTHON) tests/conformance/fork_server.py

WHEELS := $(abspath $(or $(CARGO_TARGET_DIR),target))/wheels

.PHONY: help demo test test-page browser test-asan test-fuzz test-python test-rdma test-sglang check check-python wheel bench bench-transfers bench-python
.PHONY: verbs-headers bench-planner bench-replay bench-turnaround bench-sglang bench-bootstrap cargo system-packages python sglang nextest deny clean

help: ## Lists the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

# Builds that contain the rdma transport; they start on hosts without libibverbs, too.
RDMA_BUILD := LIBCLANG_PATH=/usr/lib/llvm-14/lib
WITH_RDMA := $(or $(RDMA),$(findstring rdma,$(DEMO_ARGS)))

STAND_IN_DEBUG := $(abspath $(or $(CARGO_TARGET_DIR),target)/debug/libdevice_stand_in.so)

# Device memory needs a driver; without one the demo runs over a stand-in for it.
ON_DEVICE := $(findstring --memory device,$(DEMO_ARGS))
STAND_IN = if [[ -z "$${FERRY_CUDA_LIBRARY:-}" ]] && ! ldconfig -p | grep -qE 'lib(cuda\.so\.1|amdhip64\.so)'; then \
	  echo "no driver was found: device memory is that of the stand-in"; \
	  export FERRY_CUDA_LIBRARY=$(abspath $(or $(CARGO_TARGET_DIR),target)/release/libdevice_stand_in.so); fi;

demo: cargo $(if $(WITH_RDMA),verbs-headers) ## Moves 256 requests' hybrid state between real processes and verifies every byte (DEMO_ARGS="--help" lists options)
	$(if $(WITH_RDMA),$(RDMA_BUILD)) $(CARGO) build --release --locked --package bootstrap-server --package transfer-actor \
	  --package demo $(if $(WITH_RDMA),--features demo/rdma) $(if $(ON_DEVICE),--package device-stand-in)
	$(if $(ON_DEVICE),$(STAND_IN)) $(or $(CARGO_TARGET_DIR),target)/release/ferry-demo $(DEMO_ARGS)

.PHONY: release
release: cargo python verbs-headers ## Builds the programs and the wheel with all transports, rdma too
	$(RDMA_BUILD) $(CARGO) build --release --locked --package bootstrap-server --package transfer-actor --features transfer-actor/rdma
	$(MAKE) --no-print-directory wheel WHEEL_PROFILE=release RDMA=1

# Programs, libraries and tests in one build, as all of the workspace: a package that is built alone
# has fewer features of what it depends on, which is compiled once more then.
BUILD_TESTS := $(CARGO) build --workspace --locked --lib --bins --tests

test: cargo system-packages sglang nextest test-python test-page test-sim test-loom ## Runs every test
	rm -f $(FERRY_SKIP_LOG)
	$(BUILD_TESTS)
	$(FERRY_PYTHON) tests/conformance/selfcheck.py
	SGLCONF_MORI=installed $(FERRY_PYTHON) tests/conformance/selfcheck.py
	$(FERRY_PYTHON) tests/conformance/endurance.py
	$(VENV)/bin/pytest --quiet -p no:cacheprovider tests/conformance
	$(WITH_RANKS) $(CARGO) nextest run --workspace --locked --no-fail-fast
	$(MAKE) --no-print-directory test-device
	$(MAKE) --no-print-directory --jobs 2 --output-sync test-chaos test-links
	@if [[ -s $(FERRY_SKIP_LOG) ]]; then \
	  echo "skipped for what this machine lacks: $$(wc -l < $(FERRY_SKIP_LOG))"; cat $(FERRY_SKIP_LOG); \
	  if [[ "$${CI:-}" == true ]]; then echo "no test may be skipped in CI"; exit 1; fi; \
	else echo "skipped for what this machine lacks: 0"; fi

wheel: cargo python $(if $(RDMA),verbs-headers) ## Builds the Python wheel (WHEEL_PROFILE=release, RDMA=1) and installs it where the tests look
	rm -rf $(WHEELS)
	$(if $(RDMA),$(RDMA_BUILD)) $(VENV)/bin/maturin build $(if $(RDMA),--features rdma) --quiet --locked --manifest-path python/Cargo.toml --profile $(WHEEL_PROFILE) --out $(WHEELS)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps $(WHEELS)/*.whl

test-python: wheel ## The Python module's own tests
	$(BUILD_TESTS)
	FERRY_STAND_IN_LIBRARY=$(STAND_IN_DEBUG) \
	  FERRY_WHEELS=$(WHEELS) $(VENV)/bin/pytest --quiet -p no:cacheprovider python/tests

test-page: cargo browser ## The bootstrap server's page in headless Chromium (its pictures: target/page-screenshots)
	$(BUILD_TESTS)
	$(VENV)/bin/pytest --quiet -p no:cacheprovider tests/page

.PHONY: test-hostile
test-hostile: cargo nextest ## Hostile clients at the bootstrap server, a minute of each kind (seconds of each are part of `test`)
	$(CARGO) build --locked --package bootstrap-server
	FERRY_HOSTILE_SECONDS=$${FERRY_HOSTILE_SECONDS:-60} $(CARGO) nextest run --package tests --locked \
	  --test-threads 1 --no-fail-fast --success-output final -E 'test(/^hostile::/)'

# The ranks' rules are driven for millions of events, which needs optimised code, with its checks.
SIM_SEEDS ?= 20000
OPTIMISED := $(foreach crate,common transfer-actor,--config profile.dev.package.$(crate).opt-level=2)

.PHONY: test-sim
test-sim: cargo nextest ## The rank's rules under SIM_SEEDS=20000 simulated runs, and without each of them (FERRY_SIM_SEED=n replays one)
	FERRY_SIM_SEEDS=$(SIM_SEEDS) $(CARGO) nextest run --package transfer-actor --lib --locked $(OPTIMISED) \
	  --run-ignored all --success-output final --no-fail-fast -E 'test(/::simulation::/)'

.PHONY: test-limits
test-limits: cargo nextest ## One rank under 1,000,000 orphan rooms, as many malformed messages, and 2,000 peers (smaller in `test`)
	ulimit -n $$(ulimit -Hn); FERRY_FLOOD=$${FERRY_FLOOD:-1000000} FERRY_PEERS=$${FERRY_PEERS:-2000} \
	  $(CARGO) nextest run --package transfer-actor --lib --locked $(OPTIMISED) \
	  --test-threads 1 --success-output final --no-fail-fast -E 'test(/::limits::/)'

.PHONY: chaos-programs test-chaos test-links
chaos-programs: cargo
	$(BUILD_TESTS)

test-chaos: chaos-programs ## Kills and stops real ranks and the bootstrap server under load for CHAOS_S=120 seconds (FERRY_SEED=n repeats choices; part of `test`)
	$(or $(CARGO_TARGET_DIR),target)/debug/ferry-chaos

test-links: chaos-programs ## The same between network namespaces whose links are cut, over tcp (CHAOS_S=120; part of `test`)
	$(or $(CARGO_TARGET_DIR),target)/debug/ferry-chaos --links

test-rdma: cargo verbs-headers sglang ## Tests the rdma transport in virtual machines with soft-RoCE devices (STAGES="faults demo" picks)
	tests/rdma-vm/setup.sh
	$(RDMA_BUILD) $(CARGO) clippy --workspace --features demo/rdma,ferry-python/rdma,tests/rdma,bench-driver/rdma \
	  --all-targets --locked -- -D warnings
	$(MAKE) --no-print-directory wheel RDMA=1
	$(RDMA_BUILD) tests/rdma-vm/test.sh $(STAGES)

# rdma-sys makes its bindings with libclang 14: its generator does not know later ones.
verbs-headers:
	@packages=(libibverbs-dev librdmacm-dev pkg-config libclang1-14 libclang-common-14-dev); \
	if ! dpkg --status "$${packages[@]}" >/dev/null 2>&1; then \
	  echo "installing: $${packages[*]}"; \
	  if [[ $$(id -u) == 0 ]]; then sudo=(); else sudo=(sudo); fi; \
	  "$${sudo[@]}" apt-get update -qq && "$${sudo[@]}" apt-get install -y -qq --no-install-recommends "$${packages[@]}"; \
	fi

test-sglang: cargo sglang wheel nextest ## SGLang's own classes as the other side, and on both sides over our Python module (part of `test`)
	$(FERRY_PYTHON) tests/conformance/selfcheck.py
	SGLCONF_MORI=installed $(FERRY_PYTHON) tests/conformance/selfcheck.py
	$(FERRY_PYTHON) tests/conformance/endurance.py
	$(VENV)/bin/pytest --quiet -p no:cacheprovider tests/conformance
	$(BUILD_TESTS)
	$(WITH_RANKS) $(CARGO) nextest run --workspace --locked --no-fail-fast -E 'package(tests) & test(/^conformance::/)'

# Left out: older releases, whose messages do not know where memory is, and what needs the hooks of
# the double of MoRI, which knows no device. Most of a test is waiting, so more run than there are
# processors.
ON_DEVICE_TESTS := package(tests) & test(/^conformance::/) - test(/^conformance::releases::/) \
  - test(/^conformance::ends::(a_failed_write_of_sglang|a_decode_gives_up_while_sglang_writes)$$/)

.PHONY: test-device
test-device: cargo sglang wheel nextest ## The conformance tests with pools in device memory, over shm and tcp and the stand-in for a driver
	$(BUILD_TESTS)
	for transport in shm tcp; do \
	  FERRY_TEST_MEMORY=device FERRY_TEST_TRANSPORT=$$transport FERRY_CUDA_LIBRARY=$(STAND_IN_DEBUG) \
	    $(WITH_RANKS) $(CARGO) nextest run --workspace --locked --no-fail-fast --test-threads $$((2 * $$(nproc))) \
	    -E '$(ON_DEVICE_TESTS)' || exit 1; \
	done

check: cargo deny check-python ## Format, lints, documentation, licences and bans; nothing may warn
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	$(CARGO) deny --locked check --allow no-license-field bans licenses sources

PYTHON_FOLDERS := tests/conformance tests/page python bench/sglang bench/rdma

check-python: python
	$(VENV)/bin/ruff format --check $(PYTHON_FOLDERS)
	$(VENV)/bin/ruff check $(PYTHON_FOLDERS)

# Sanitizers are unstable features of the compiler, which this opens on the pinned stable one.
NIGHTLY_FEATURES := RUSTC_BOOTSTRAP=1
HOST_TARGET = $(shell rustc -vV | sed -n 's/^host: //p')

test-asan: cargo system-packages nextest ## The io engine's tests under AddressSanitizer
	$(NIGHTLY_FEATURES) RUSTFLAGS="-Zsanitizer=address" $(CARGO) nextest run --package io-engine --locked \
	  --target $(HOST_TARGET) --target-dir $(abspath $(or $(CARGO_TARGET_DIR),target))/asan

# The models' own name, since `--cfg loom` would change crates that they do not look at.
.PHONY: test-loom
test-loom: cargo nextest ## The io engine's locks, flags and wake-ups in every order of its threads, under loom (part of `test`)
	RUSTFLAGS="--cfg ferry_loom" $(CARGO) nextest run --package io-engine --lib --locked \
	  --config profile.dev.package.loom.opt-level=2 --config profile.dev.package.generator.opt-level=2 \
	  --target-dir $(abspath $(or $(CARGO_TARGET_DIR),target))/loom -E 'test(/^models::/)'

FUZZ_TARGETS = $(notdir $(basename $(wildcard fuzz/fuzz_targets/*.rs)))
FUZZ_S ?= 60
FUZZ_CORPUS := target/fuzz-corpus
FUZZ_BUILD = $(abspath $(or $(CARGO_TARGET_DIR),target))/fuzz

test-fuzz: cargo system-packages ## Every decoder of foreign bytes, fuzzed for FUZZ_S=60 seconds each
	@$(CARGO) fuzz --version >/dev/null 2>&1 || $(INSTALL_TOOL) cargo-fuzz
	python3 fuzz/seeds.py $(FUZZ_CORPUS)
	$(NIGHTLY_FEATURES) $(CARGO) fuzz build --target-dir $(FUZZ_BUILD)
	@for target in $(FUZZ_TARGETS); do \
	  echo "fuzzing $$target for $(FUZZ_S) s"; \
	  $(NIGHTLY_FEATURES) $(CARGO) fuzz run --target-dir $(FUZZ_BUILD) $$target $(FUZZ_CORPUS)/$$target -- \
	    -max_total_time=$(FUZZ_S) -max_len=65536 -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 -verbosity=0; \
	done

bench: cargo ## Criterion, then bench-planner, bench-turnaround and bench-transfers
	$(CARGO) bench --workspace --locked
	$(MAKE) --no-print-directory bench-planner bench-turnaround bench-transfers

bench-transfers: cargo bench-python ## Ferry beside the machine's limits; PEERS=1 adds Mooncake and NIXL (BENCH_ARGS="--help")
	$(CARGO) build --release --locked --package bench-driver
	$(BENCH_PYTHON) bench/peers/test_harness.py
	$(BENCH_PYTHON) bench/peers/run.py --probes --write-to bench/results $(if $(PEERS),--peers) $(BENCH_ARGS)

.PHONY: bench-rdma
bench-rdma: cargo verbs-headers ## Our writes over rdma beside perftest's ib_write_bw, on soft-RoCE in one virtual machine (RDMA_ARGS="--rounds 9")
	tests/rdma-vm/setup.sh
	$(RDMA_BUILD) $(CARGO) build --release --locked --package bench-driver --features bench-driver/rdma
	mkdir -p bench/results
	tests/rdma-vm/run.sh -n lo -t 900 -o target/bench-rdma bench/rdma/inside.py $(BENCH_DRIVER) $(RDMA_ARGS)
	cp target/bench-rdma/result.json bench/results/rdma.json

bench-python: system-packages
	@PEERS=$(PEERS) bench/peers/install.sh

bench-planner: sglang ## Our planner beside SGLang's own functions, in one run (PLANNER_ARGS="--help" lists options)
	$(CARGO) build --release --locked --package bench-workloads
	$(FERRY_PYTHON) bench/planner_beside_sglang.py --conformance tests/conformance \
	  --program $(or $(CARGO_TARGET_DIR),target)/release/bench-workloads $(PLANNER_ARGS)

bench-replay: cargo ## Replays the reference runs' state traffic beside the raw limit (REPLAY_ARGS="--help" lists options)
	$(CARGO) build --release --locked --package bench-workloads
	mkdir -p bench/results
	target/release/bench-workloads replay --json bench/results/replay.json $(REPLAY_ARGS)

bench-turnaround: cargo ## Times a request of one page beside the bare round trip of messages (TURNAROUND_ARGS)
	$(CARGO) build --release --locked --package bench-workloads --package bootstrap-server
	mkdir -p bench/results
	target/release/bench-workloads turnaround --json bench/results/turnaround.json $(TURNAROUND_ARGS)

bench-sglang: sglang ## What our Python module adds to SGLang's own time for a request (SGLANG_ARGS="--help")
	$(MAKE) --no-print-directory wheel WHEEL_PROFILE=release
	$(FERRY_PYTHON) bench/sglang/turnaround.py $(SGLANG_ARGS)

bench-bootstrap: cargo ## The bootstrap server beside SGLang's two and a bare limit, in one run (BOOTSTRAP_ARGS="--help" lists options)
	$(CARGO) build --release --locked --package bootstrap-server
	bench/bootstrap/install.sh
	mkdir -p bench/results
	python3 bench/bootstrap/run.py --server $(or $(CARGO_TARGET_DIR),target)/release/bootstrap-server \
	  --compared target/bench-bootstrap --write-to bench/results $(BOOTSTRAP_ARGS)

clean: ## Removes what was built
	$(CARGO) clean

cargo:
	@command -v $(CARGO) >/dev/null || { echo "cargo is missing: install Rust with rustup (https://rustup.rs), then run this again"; exit 1; }
	@command -v cc >/dev/null || $(MAKE) --no-print-directory system-packages

define install-packages
echo "installing:" $(1); if [[ $$(id -u) == 0 ]]; then sudo=(); else sudo=(sudo); fi; \
"$${sudo[@]}" apt-get update -qq && "$${sudo[@]}" apt-get install -y -qq --no-install-recommends $(1)
endef

# strace proves that registrations are on the disk before they are acknowledged; the Python
# environment holds the peers that the wire is tested against.
system-packages:
	@missing=(); for entry in cc:gcc strace:strace python3:python3; do \
	  command -v "$${entry%%:*}" >/dev/null || missing+=("$${entry##*:}"); done; \
	python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv); \
	if (( $${#missing[@]} )); then $(call install-packages,"$${missing[@]}" libc6-dev); fi

python: system-packages $(VENV)/ready | system-packages

$(VENV)/ready: tests/conformance/requirements.txt python/requirements.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(addprefix --requirement=,$^)
	touch $@

# Debian's Chromium, and a typeface, so that the pictures are the same everywhere.
browser: $(VENV)/page
	@missing=(); command -v chromium >/dev/null || missing+=(chromium); \
	[[ -d /usr/share/fonts/opentype/inter ]] || missing+=(fonts-inter); \
	if (( $${#missing[@]} )); then $(call install-packages,"$${missing[@]}"); fi

$(VENV)/page: tests/page/requirements.txt $(VENV)/ready | system-packages
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r tests/page/requirements.txt
	touch $@

# By name from the package index; the modules run as they are.
sglang: python
	@tests/conformance/fetch.sh $(FERRY_SGLANG) $(SGLANG_RELEASE) $(SGLANG_OLDER)

# Optimising these takes longer than what they do here gains from it.
INSTALL_TOOL := $(CARGO) install --locked --debug

nextest:
	@$(CARGO) nextest --version >/dev/null 2>&1 || $(INSTALL_TOOL) cargo-nextest

deny:
	@$(CARGO) deny --version >/dev/null 2>&1 || $(INSTALL_TOOL) cargo-deny
