# `make demo` and `make test` need nothing but Python 3.11 or newer; everything else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-thorough test-all test-nightly lint fuzz bench docs docs-serve clean

demo: .venv/base
	$(BIN)/minipaged demo

# One BLAS thread in each of the two test processes: four threads on two cores would mostly wait for each other.
PYTEST = OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 10
SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

test: .venv/test
	$(PYTEST) -m 'not thorough'

# The tests that `make test` leaves out, and those with random examples once more, with all of them.
test-thorough: .venv/test
	$(PYTEST) -m 'thorough or scaled or hypothesis' --hypothesis-profile thorough --hypothesis-seed $(SEED)

test-all: test test-thorough

test-nightly: .venv/test
	$(PYTEST) --hypothesis-profile nightly --hypothesis-seed $(SEED)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: .venv/test
	$(BIN)/python -m tests.fuzz --workloads 100000

bench: .venv/test
	$(BIN)/python -m benchmarks.reference
	$(BIN)/python -m benchmarks.fast

docs: .venv/test
	$(BIN)/python -m docs.build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "minipaged needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/base: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# Pinned torch is asked for by name, so that a machine without a GPU gets the build that its index offers for it.
.venv/test: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@ .venv/base

clean:
	rm -rf .venv build site *.egg-info
