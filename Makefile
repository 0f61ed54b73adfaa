# Each target is enough on a fresh machine: it makes the virtual environment and installs what it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
APT := procps util-linux etcd-server etcd-client openssl openssh-server iproute2 rsync slurm-wlm munge tcsh zsh fish

# A run of the tests starts thousands of processes, which read compiled modules even where others are told to write none.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick properties soak chaos engines browser mutants planted check docs bench gpu clean

# torch first, from pip's own index; the build on PyPI is for CUDA and takes 5.6 GB with its dependencies. TORCH_INDEX names
# another index for torch alone. Its dependencies come from pip's own index in the next step, as the other may lack them.
TORCH_INDEX ?=
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--no-deps --index-url "$(TORCH_INDEX)") "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[examples]"
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# Programs that tests call. They are installed if one is missing and the user is root.
$(VENV)/.system: Makefile | $(VENV)/.dev
	(for each in mount prlimit ps etcd etcdctl openssl ssh sshd ip rsync slurmctld slurmd sbatch munged tcsh zsh fish; do command -v $$each || exit; done) >/dev/null || { \
	  test $$(id -u) -eq 0 || { echo "install these Debian packages first: $(APT)"; exit 1; }; \
	  apt-get update -qq && apt-get install -y -qq $(APT) >/dev/null; }
	touch $@

demo: $(VENV)/.installed
	$(BIN)/unirun --roles actor=2,rollout=2 examples/ppo_cartpole/train.py --seeds 0,1,2 --out reward.png

# Four tests at a time on two cores, as many wait for a process most of the time. Everything is imported and collected
# once, and the tests of a file run in one fork of that process (tests/forked.py).
JOBS ?= 4
test: $(VENV)/.dev $(VENV)/.system
	$(BIN)/python -m pytest -q -p tests.flaky -p tests.forked --processes $(JOBS) --durations 20

# All tests that start no process, with fewer examples of each property: about a minute.
quick: $(VENV)/.dev
	$(BIN)/python -m pytest -q -p tests.forked --processes 2 tests/unit tests/test_architecture.py -m "not starts_processes" --hypothesis-profile quick

# More simulated histories. A failing seed is printed, and UNIRUN_SIM_SEED=N repeats it. Then, with MODULE for one part alone:
# some of CPython's own tests, under plain python and in workers (half an hour; MODULE=test_signal runs one module of them);
# a thousand jobs from one warm process (ten minutes; MODULE=warm); all ready experiments with three seeds (fifteen minutes;
# MODULE=experiments); the price of staleness with fifteen (an hour; MODULE=staleness, and UNIRUN_SOAK_SEEDS=0 for one of
# them, a few minutes); the oldest and the newest torch, which pip installs below $(VENV) (10 GB, if no index has builds for
# the CPU; MODULE=other_torch).
SEEDS ?= 50000
soak: $(VENV)/.dev
	UNIRUN_SIM_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q tests/sim
	$(BIN)/python -m pytest -q tests/soak $(if $(MODULE),-k $(MODULE))

# Ten times as many random examples of each property; `make test` has the same ones each time. This takes long.
properties: $(VENV)/.dev
	$(BIN)/python -m pytest -q -p tests.forked --processes 2 tests/unit -m "not starts_processes" --hypothesis-profile properties

# The tests of `make test` that run a few times or in one variant there, more often and in all variants: 500 pairs of kills,
# with the times until all ranks are up again; fifty deaths of the master; one before and after each of its writes; deaths
# in each phase of a trial; more failures of hosts; calls without TLS. About an hour. ONLY=tests/integration/hosts runs a part.
PAIRS ?= 50
ONLY ?= tests/chaos tests/contract tests/integration
chaos: $(VENV)/.dev $(VENV)/.system
	UNIRUN_CHAOS=1 UNIRUN_CHAOS_PAIRS=$(PAIRS) $(BIN)/python -m pytest -q -p tests.forked --processes 2 $(ONLY)

# Weights in vLLM itself, on CPUs, in a separate environment below $(VENV) (3.4 GB, made once, in three minutes). The tests
# take nine minutes and 6 GB of memory. MODULE=test_vllm runs a part.
engines: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/engines $(if $(MODULE),-k $(MODULE))

# The page of `unirun dashboard` in Debian's Chromium, and its pictures in docs/pictures: two minutes. axe-core, which looks
# for what hinders people who do not see or use no mouse, comes from npm. And its metrics, scraped by Debian's Prometheus.
AXE := axe-core@4.14.1
$(VENV)/axe/package/axe.min.js:
	command -v npm >/dev/null || { echo "install npm first"; exit 1; }
	mkdir -p $(VENV)/axe && cd $(VENV)/axe && npm pack --silent $(AXE) && tar xzf axe-core-*.tgz
browser: $(VENV)/.dev $(VENV)/axe/package/axe.min.js
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium fonts-dejavu-core >/dev/null; }
	command -v prometheus >/dev/null || { apt-get update -qq && apt-get install -y -qq prometheus >/dev/null; }
	$(BIN)/python -m pytest -q -s tests/browser

# Small faults are made in the rooms that decide or keep something, and tests must detect nine of ten (tests/mutants). All
# faults take hours. ROOM=wire makes those of one room, and SAMPLE=200 at most 200 of each room, drawn with a fixed seed:
# two to twenty-one minutes of processor time for each room, and as long again for faults that hang. At its end a room says
# what it took.
ROOM ?= wire failover rendezvous launcher calls master rollout experiments collocation train weights spec roles slurm observe
mutants: $(VENV)/.dev
	failed=; for room in $(ROOM); do \
	  $(BIN)/python tests/mutants/run.py $$room --jobs $(JOBS) $(if $(SAMPLE),--sample $(SAMPLE)) || failed="$$failed $$room"; \
	done; test -z "$$failed" || { echo "tests detect too few faults in:$$failed"; exit 1; }

# Bugs of the kinds that people make are planted one at a time, and their tests have to notice 95 of a hundred
# (tests/mutants/planted). BUG=weights tries those with this in their names or kinds.
planted: $(VENV)/.dev
	$(BIN)/python tests/mutants/planted.py $(BUG) --jobs $(JOBS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/mypy tests
	for example in $$(dirname examples/*/*.py | sort -u); do $(BIN)/mypy $$example || exit 1; done

# The API reference from the docstrings, the tables of phases, and pictures. Tests fail when they are out of date.
docs: $(VENV)/.dev
	$(BIN)/python docs/reference.py docs/api
	$(BIN)/python docs/phases.py docs/phases.md
	$(BIN)/python docs/failover.py docs/failover.md
	$(BIN)/python docs/pictures.py docs/pictures

# On a bare machine with a GPU: all tests that need one, the contract of devices, NCCL and the figures of the weights
# channel, in eight minutes. It needs no network, and installs only into a temporary environment. PYTHON=… must have torch
# 2.11 or later. WHEELS=DIR has wheels of the missing packages; without WHEELS they are named.
gpu:
	$(PYTHON) tests/gpu.py $(if $(WHEELS),--wheels $(WHEELS))

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .mutants
