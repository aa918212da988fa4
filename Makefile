# Two commands do everything on a fresh machine: make goldens, make test.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: goldens test lint clean

# Torch comes first and pinned: other packages ask for a bare one, which may bring a CUDA build of gigabytes.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else f"$(PYTHON) is {v[0]}.{v[1]}; 3.10 or newer is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

goldens: $(STAMP)
	$(BIN)/goldens regenerate
	$(BIN)/goldens report --markdown reports/tolerance.md --json reports/tolerance.json
	@echo "the same report as files: reports/tolerance.md, reports/tolerance.json"

test: $(STAMP)
	$(BIN)/python -m pytest -q -n auto $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:
	rm -rf $(VENV) reports build *.egg-info
