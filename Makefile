.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-all lint format bench e2e-vllm e2e-vllm-pd e2e-lmcache clean

help: ## list what can be made
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

demo: $(VENV)/ready ## four simulated workers, two policies, one table (under two minutes)
	$(BIN)/kvway demo

# Compiled files are kept, for the tests start a great many processes of the product.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/ready ## the fast tests (under five minutes on two cores)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: $(VENV)/ready ## the fast tests, the slow ones, and five times as many examples of every property
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not e2e' --hypothesis-profile=thorough --timeout=300

lint: $(VENV)/ready ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready ## every benchmark, one after another
	for name in prompt index events relay chaos sim fidelity policies disaggregation peers; do $(BIN)/python -m tests.bench.$$name || exit 1; done

e2e-vllm: $(VENV)/ready ## two real vLLM workers behind the gateway (large download, some minutes)
	$(PYTHON) -m tests.e2e.setup_vllm .venv-vllm
	$(BIN)/python -m pytest -m e2e tests/e2e

e2e-vllm-pd: $(VENV)/ready ## two of them over NIXL, one that prefills and one that decodes
	$(PYTHON) -m tests.e2e.setup_vllm .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --no-deps nixl==1.5.2 nixl-cu12==1.5.1
	$(BIN)/python -m pytest -m e2e tests/e2e/test_disaggregation.py

e2e-lmcache: $(VENV)/ready ## a real LMCache coordinator and cache server beside simulated workers
	$(PYTHON) -m tests.e2e.setup_lmcache .venv-lmcache
	$(BIN)/python -m pytest -m e2e tests/e2e/test_cache_control.py

clean: ## remove the virtual environments and caches
	rm -rf $(VENV) .venv-vllm .venv-lmcache .venv-bench .mypy_cache .ruff_cache .hypothesis
