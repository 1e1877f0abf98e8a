# Two commands from a fresh clone: `make demo` and `make test`. Both make .venv first (scripts/bootstrap.py).

# Without bytecode on disk each engine compiles vLLM and torch anew: two thirds of its start.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv/bin

# The reports and the docs are data: nothing here writes outside .venv, .cache and reports.
.PHONY: help demo test test-fast test-matrix lint format bootstrap clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       a real vLLM, traced under traffic, and the explanation of the run"
	@echo "make test       lint, types and every test, those on a real vLLM engine included"
	@echo "make test-fast  every test that needs no engine"
	@echo "make test-matrix  kvtrace on ten versions of vLLM, each in an environment of its own, removed after"
	@echo "make lint       ruff and mypy;  make format: let ruff rewrite the files"
	@echo "make clean      remove .venv and .cache (reports stay)"
	@echo "PYTHON=...      the Python 3.11 to build .venv from (now: $(or $(PYTHON),none found))"

bootstrap:
	@test -n "$(PYTHON)" || { echo "make: no python3.11 or python3 in PATH; name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
	@"$(PYTHON)" scripts/bootstrap.py

demo: bootstrap
	@$(VENV)/python scripts/demo.py

# Engines share two cores with nobody; the other tests share them with each other.
test: lint
	$(VENV)/python -m pytest -m "not engine" -n 2 --dist worksteal
	$(VENV)/python -m pytest -m engine

test-fast: bootstrap
	$(VENV)/python -m pytest -m "not engine" -n 2 --dist worksteal

test-matrix: bootstrap
	$(VENV)/python scripts/version_matrix.py

lint: bootstrap
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

format: bootstrap
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
