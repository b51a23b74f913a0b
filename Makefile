# Everything a fresh machine with python3, pip and make needs: each target sets up .venv first.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= runs/collision
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup reproduce bench test test-slow docs fuzz sanitize kernels explorer lint format resolve lock package wheel

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: .venv/ready  ## create .venv and install the package with all its tools (HASHES=1: only files with a locked hash)

.venv/command: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[command,figures]'
	@touch $@

# requirements-dev.txt has a hash of every file, so it admits only the builds on the public index. By default the same
# versions are installed by constraints.txt, which also admits other builds of them, such as PyTorch's CPU build.
ifdef HASHES
.venv/ready: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch .venv/command $@
else
.venv/ready: .venv/command
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
endif

reproduce: .venv/command  ## reproduce the paper's collision experiment: table, figures and report (under a minute)
	$(BIN)/mbd reproduce collision --preset paper --out $(OUT)

bench: .venv/ready  ## measure speed and memory compared with Transformers, into benchmarks/ (about half an hour, on an idle machine)
	$(BIN)/mbd bench --out benchmarks

test: .venv/ready  ## run the tests, without the slow ones
	$(BIN)/python -m pytest -q -n 2 -m 'not slow'

# lm-evaluation-harness brings forty packages of 350 MB, which only a slow test needs.
.venv/evaluation: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,evaluation]'
	@touch $@

test-slow: .venv/evaluation  ## run the slow tests
	$(BIN)/python -m pytest -q -n 2 -m slow

.venv/docs: .venv/command
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(if $(wildcard .venv/ready),.venv/ready,.venv/docs)  ## build the documentation into site/ and check it (seconds; VERSION=1.2.3: into site/1.2.3/)
	$(BIN)/python -m website $(if $(VERSION),--version $(VERSION))

fuzz: .venv/ready  ## compare 20,000 random filters with a reference written from the mathematics (ARGS="--seconds 60", CASE=seed:number)
	PYTHONPATH=tests:benchmarks $(BIN)/python -m fuzzing $(if $(CASE),--case $(CASE)) $(ARGS)

sanitize: .venv/ready  ## run native code with the address and undefined-behaviour sanitizers: tests of filters, then the fuzzer (minutes)
	.ci/sanitize

kernels: .venv/ready  ## compile every GPU kernel for A100 and H100, on any machine, with three versions of Triton (minutes; ARGS=--quick: one)
	$(BIN)/python .ci/kernels.py $(ARGS)

lint: .venv/ready  ## ruff, pyright and the one-way order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

resolve: .venv/ready  ## check that the pinned versions resolve from a plain package index for every supported Python (a minute)
	$(BIN)/python .ci/resolve.py

lock: .venv/ready  ## pin what the Makefile installs: constraints.txt and, with hashes, requirements-dev.txt (UPGRADE=--upgrade)
	$(BIN)/python .ci/resolve.py --write $(UPGRADE)

package: .venv/ready  ## build sdist and wheel into dist/ and check them
	rm -rf dist
	$(BIN)/python -m build --quiet $(if $(HASHES),--no-isolation)
	$(BIN)/twine check --strict dist/*

wheel: .venv/ready  ## build a wheel with compiled code for this platform into dist/ (needs a C compiler; four CPU minutes)
	MEMBYDESIGN_PREBUILT=1 $(BIN)/python -m build --quiet --wheel

.venv/zig: .venv/ready
	$(BIN)/python -m pip install --quiet ziglang==0.17.0
	@touch $@

explorer: .venv/zig  ## compile the decoding step in C to WebAssembly for `mbd explore` (minutes, the first time)
	$(BIN)/python -m membydesign.explore.wasm

format: .venv/ready  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
