# Two commands: make demo, make test. Everything is installed into .venv, at the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
OUT ?= runs/demo

.PHONY: demo test test-slow check format clean fetch

demo: $(VENV)/.installed fetch
	$(BIN)/trew demo --seed $(SEED) --out $(OUT) --overwrite

fetch: $(VENV)/.installed
	$(BIN)/python -m trew.models

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test-slow: $(VENV)/.installed-dev fetch
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trew needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv"; exit 2; }

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist runs
