# Two commands do everything on a fresh machine: make goldens, make test.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REPORT := reports/tolerance
SHARD ?= 1/1

.PHONY: goldens digests report test lint evidence clean

# Torch comes first and pinned: other packages ask for a bare one, which may bring a CUDA build of gigabytes.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else f"$(PYTHON) is {v[0]}.{v[1]}; 3.10 or newer is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# Made again and compared, not written: that is for `goldens regenerate`.
goldens: $(STAMP)
	$(BIN)/goldens regenerate --check
	@$(MAKE) --no-print-directory report

# The cases that are not in git too, by their digests; SHARD=I/N takes a part.
digests: $(STAMP)
	$(BIN)/goldens regenerate --check --all --shard $(SHARD)

report: $(STAMP)
	$(BIN)/goldens report --html $(REPORT).html --markdown $(REPORT).md --json $(REPORT).json
	@echo "the same as files: $(REPORT).md, $(REPORT).json, and to look at:"
	@echo "$(abspath $(REPORT).html)"

# Tests that need a browser or a C++ compiler run where there is one; the last lines say what was left out.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# Whether each kernel is what ran on the GPU: docs/evidence.md.
evidence: $(STAMP)
	$(BIN)/python -m tools.evidence --check

clean:
	rm -rf $(VENV) reports build *.egg-info
