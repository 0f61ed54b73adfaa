# Each target is enough on a fresh machine: it makes the virtual environment and installs what it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
APT := procps util-linux etcd-server etcd-client openssl

.PHONY: demo test soak check bench clean

# The pinned CPU build of torch first, so that nothing pulls in the CUDA packages.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[examples]"
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

# Programs that tests call (mount, prlimit, ps, etcd); installed when this user may and one is missing.
$(VENV)/.system: Makefile | $(VENV)/.dev
	(for each in mount prlimit ps etcd etcdctl openssl; do command -v $$each || exit; done) >/dev/null || { \
	  test $$(id -u) -eq 0 || { echo "install these Debian packages first: $(APT)"; exit 1; }; \
	  apt-get update -qq && apt-get install -y -qq $(APT) >/dev/null; }
	touch $@

demo: $(VENV)/.installed
	$(BIN)/unirun --roles actor=2,rollout=2 examples/ppo_cartpole/train.py --seeds 0,1,2 --out reward.png

# Two tests at a time: most of the time one waits for a process that starts. More need more than two cores.
JOBS ?= 2
test: $(VENV)/.dev $(VENV)/.system
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

# More histories than the tests have; a failing seed is printed, and replayed with UNIRUN_SIM_SEED=N.
SEEDS ?= 50000
soak: $(VENV)/.dev
	UNIRUN_SIM_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q tests/sim

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	for example in examples/*/; do $(BIN)/mypy $$example || exit 1; done

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
