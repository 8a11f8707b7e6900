# `make run` trains on the embedded handwriting; `make test` runs the quick suite, `make test-all` the long checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PEERS := $(VENV)/installed-peers
INTEGRATIONS := $(VENV)/installed-integrations
# With torch already there, pip keeps it: this release has a CPU build and pyproject.toml stays free to ask for more.
TORCH ?= torch==2.13.0
# Its interpreter and its compiler work without a GPU. CUDA builds of torch bring their own, which is kept.
TRITON ?= triton==3.9.0
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
CODE := src bench examples experiments tests

NAME ?=
DEVICE ?=
PAPER ?=
FLAGS ?=

.PHONY: run test test-all test-gpu install peers integrations lint format docs bench reproduce clean

run: install
	$(BIN)/stretto train handwriting

test: install
	$(PYTEST) -m "not slow"

# The long checks: the full parity sweep, the fault suite, bench and experiments, real data (STRETTO_DATA), and 6,000 fuzzed
# cells, 2,000 of them by Triton: STRETTO_FUZZ is the number of cells of the largest fuzz test.
test-all: peers integrations
	$(PYTEST) -m slow --durations=40
	STRETTO_FUZZ=$${STRETTO_FUZZ:-1150} $(PYTEST) -m "not slow" tests/fuzz

# Whoever has a GPU: parity on it. Where there is none, Triton's interpreter is the device.
test-gpu: install
	$(BIN)/python -m pytest tests/parity/test_parity_gpu.py tests/parity/test_parity_triton.py

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Stretto needs Python 3.10 or newer; try make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	test "$$(uname -s)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps $(TRITON)
	touch $(STAMP)

# What benchmarks compare with and examples build on: JAX, Lhotse, Hugging Face, Lightning; and the compiler from PyPI.
peers: $(PEERS)

$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[peers,compiler]'
	touch $(PEERS)

# The frameworks of docs/frameworks.md, whose programs are tests.
integrations: $(INTEGRATIONS)

$(INTEGRATIONS): $(STAMP)
	$(BIN)/python -m pip install --quiet $(TORCH) --editable '.[integrations]'
	touch $(INTEGRATIONS)

lint: install
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

docs: install
	$(BIN)/mkdocs build --strict

# make bench NAME=kernels FLAGS="--quick"        make bench NAME=kernels DEVICE=cuda 
#       make reproduce PAPER=bucketing
bench: peers
	$(BIN)/python -m bench $(NAME) $(if $(DEVICE),--device $(DEVICE)) $(FLAGS)

reproduce: peers
	$(BIN)/python -m experiments $(PAPER) $(FLAGS)

clean:
	rm -rf $(VENV) site build dist
