# `make run` trains on the embedded handwriting; `make test` runs the quick suite, `make test-all` the long checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PEERS := $(VENV)/installed-peers
# With torch already there, pip keeps it: this release has a CPU build and pyproject.toml stays free to ask for more.
TORCH ?= torch==2.13.0
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
CODE := src bench experiments tests

NAME ?=
PAPER ?=
FLAGS ?=

.PHONY: run test test-all install peers lint format docs bench reproduce clean

run: install
	$(BIN)/stretto train handwriting

test: install
	$(PYTEST) -m "not slow"

# The long checks: the full parity sweep, the fault suite, bench and experiments, real data (STRETTO_DATA), and 2,000 fuzzed
# cells: STRETTO_FUZZ is the number of cells of the largest fuzz test; all of them together have three times as many.
test-all: peers
	$(PYTEST) -m slow
	STRETTO_FUZZ=$${STRETTO_FUZZ:-660} $(PYTEST) -m "not slow" tests/fuzz

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Stretto needs Python 3.10 or newer; try make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

# What the benchmarks compare with: JAX, Lhotse, Hugging Face.
peers: $(PEERS)

$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[peers]'
	touch $(PEERS)

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

# make bench NAME=kernels FLAGS="--quick"        make reproduce PAPER=bucketing
bench: peers
	$(BIN)/python -m bench $(NAME) $(FLAGS)

reproduce: peers
	$(BIN)/python -m experiments $(PAPER) $(FLAGS)

clean:
	rm -rf $(VENV) site build dist
