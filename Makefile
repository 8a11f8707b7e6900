# Two commands: `make run` trains on the embedded handwriting, `make test` runs every test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# With torch already there, pip keeps it: this release has a CPU build and pyproject.toml stays free to ask for more.
TORCH ?= torch==2.13.0

.PHONY: run test install lint docs peers clean

run: install
	$(BIN)/stretto train handwriting

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Stretto needs Python 3.10 or newer; try make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(STAMP)

# The other samplers that `stretto bench buckets` compares with.
peers: install
	$(BIN)/python -m pip install --quiet --editable '.[peers]'

lint: install
	$(BIN)/ruff format --check src bench experiments tests
	$(BIN)/ruff check src bench experiments tests
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist
