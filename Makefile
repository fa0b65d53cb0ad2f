# Everything a person needs is a target here; `make` alone lists them.
# A line "target: ## text" is its documentation (a test checks that every target has one).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory
.SUFFIXES:

# Tests and benches start hundreds of processes: each would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
# What `make lint` and `make types` look at: of these folders the ones that hold Python.
FOLDERS := core/src coordination/src worker/src operator/src pipeline/src client/src docker tools bench e2e tests
SOURCES = $(foreach folder,$(FOLDERS),$(if $(shell find $(folder) -name '*.py' -print -quit 2>/dev/null),$(folder)))

# Settings that a person may give: make run LISTEN=127.0.0.1:9000 DATA=/somewhere
DATA ?= data
LISTEN ?= 127.0.0.1:8080
RUN_ARGS ?=
TEST_ARGS ?=
TEST_JOBS ?= 2
BENCH_ARGS ?=

-include mk/*.mk

.PHONY: help
help: ## List the targets
	@awk -F':.*## ' '/^[a-zA-Z0-9_-]+:.*## / {printf "  \033[1m%-13s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: run
run: ## Run Tidewater here with a quickstart topic (DATA=data LISTEN=127.0.0.1:8080)
	@$(PYTHON) tools/setup.py run
	@exec $(BIN)/tidewater dev --data $(DATA) --listen $(LISTEN) $(RUN_ARGS)

.PHONY: setup
setup: ## Make .venv with everything for development (done by the other targets when needed)
	@$(PYTHON) tools/setup.py dev

.PHONY: test
test: check ## Check, then run all tests (TEST_ARGS="-k name", TEST_JOBS=2)
	@PYTHONPATH=tests/lib $(BIN)/python -m tidewater_testing.parts.fetch
	@# In the order of the folders: the long ones (fault, integration) first, or the last one is waited for.
	@timeout --kill-after=30 2700 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder --durations=15 $(TEST_ARGS)

.PHONY: test-fast
test-fast: setup ## Run the tests that take seconds (no slow ones, no Java)
	@$(BIN)/python -m pytest -m "not slow and not java" -x -q $(TEST_ARGS)

.PHONY: check
check: lint types imports crds-check ## Check style, types, direction of imports and generated files

.PHONY: lint
lint: setup ## Check style and formatting (ruff)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check --quiet $(SOURCES)

.PHONY: fmt
fmt: setup ## Format the code and fix what can be fixed
	@$(BIN)/ruff format $(SOURCES)
	@$(BIN)/ruff check --fix $(SOURCES)

.PHONY: types
types: setup ## Check types (mypy strict)
	@$(BIN)/mypy $(SOURCES)

.PHONY: imports
imports: setup ## Check the direction of imports (import-linter)
	@$(BIN)/lint-imports --no-logo

.PHONY: crds
crds: setup ## Generate crds/*.yaml from the models in core/
	@$(BIN)/python tools/crds.py

.PHONY: crds-check
crds-check: setup ## Check that crds/*.yaml are what the models say
	@$(BIN)/python tools/crds.py --check

.PHONY: pins
pins: setup ## Pin the requirements of every component with hashes (UPGRADE=1 takes newer versions)
	@$(BIN)/python tools/pins.py $(if $(UPGRADE),--upgrade)

.PHONY: bench
bench: setup ## Measure latency, throughput and freshness against the peers (BENCH_ARGS="--help")
	@$(BIN)/python -m bench $(BENCH_ARGS)

.PHONY: clean
clean: ## Remove caches and build results (keeps .venv and data)
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist bench/out
	@find . -path ./.venv -prune -o -path ./data -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
