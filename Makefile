# The tools come from .venv (made by scripts/setup).
BIN := .venv/bin

.PHONY: help setup check format test bench docs

help:    ## Show the targets
	@grep -E '^[a-z]+: *.*##' $(MAKEFILE_LIST) | sed -E 's/: *[^#]*##/ -/'

setup:   ## Make or refresh .venv
	@scripts/setup

check: setup  ## Lint, format, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## Apply lint fixes and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test:    ## Run the tests
	@scripts/test

bench: setup  ## Run every benchmark; results as JSON in runs/bench
	@mkdir -p runs/bench
	@for name in rollout train sync step; do \
	  $(BIN)/python scripts/bench.py $$name --json runs/bench/$$name.json || exit 1; \
	done

docs: setup  ## Write docs/config.md again from the schema
	$(BIN)/python -m conf.document
