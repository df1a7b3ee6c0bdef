# Two commands are enough: `make serve` and `make test`. Each sets up what it needs first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := test,bench

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint bench gpu clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the virtual environment and install the project into it

# torch goes first and by itself, so that no other package's looser range picks a build for it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $(STAMP)

serve: setup ## serve the bundled model on http://127.0.0.1:8000 (ARGS="--port 9000 --model DIR ...")
	$(BIN)/chairlift serve $(ARGS)

test: setup lint ## run every check: lint, types, import directions, tests (ARGS="-k name ...")
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## offline throughput of a random 135 M model beside transformers (ARGS="--requests 1 8 32 ...")
	$(BIN)/python benchmarks/offline_throughput.py --peer transformers $(ARGS)

# Where a GPU is there may be no network: then the environment is the one of $(PYTHON), as it is.
gpu: ## on a CUDA GPU: every GPU test, and the benchmark beside the device's ceilings (ARGS="--parts large ...")
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py $(ARGS)

clean: ## remove the virtual environment and everything generated
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
