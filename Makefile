# `make demo` and `make test` do all the set-up on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
# The release the tests were last run with; any from 2.11 on will do.
TORCH ?= torch==2.13.0
PROMPT ?= class Stack:

.PHONY: demo test

demo: $(VENV)/ready
	$(VENV)/bin/sametoken generate '$(PROMPT)' --temperature 0.6 --seed 1

test: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n auto --dist worksteal $(PYTEST_FLAGS)

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet '$(TORCH)'
	$(VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@
