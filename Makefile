# `make` lists the targets. Everything runs in a virtual environment that `make setup` builds;
# VENV=/some/where uses another one, PYTHON=python3.12 another interpreter.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.k3fuse-setup
DEMO := build/demo

.DEFAULT_GOAL := help
.PHONY: help setup demo test check prove-campaign size

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## build the virtual environment (again only when its inputs change)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup ## synthesise a tiny Kimi K3, compile, verify and run it on the CPU
	rm -rf $(DEMO)
	$(BIN)/k3fuse synth kimi-k3-tiny $(DEMO)/checkpoint --shards 3 --seed 0
	$(BIN)/k3fuse compile kimi-k3 $(DEMO)/checkpoint --tp 4 --batch 1,8 -o $(DEMO)/bundle
	$(BIN)/k3fuse verify $(DEMO)/bundle
	$(BIN)/k3fuse run $(DEMO)/bundle --prompt-ids 1,2,3 --max-new-tokens 16 --executor reference

test: setup ## run the tests
	$(BIN)/python -m pytest -n 2

check: setup ## lint, format, types, tests: what CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n 2

prove-campaign: setup ## break plans on purpose: the proof and random orders must notice (ARGS=--all: full K3 too)
	$(BIN)/python benchmarks/prove_campaign.py $(ARGS)

size: ## lines of Python by folder
	@find k3fuse tests examples benchmarks -name '*.py' 2>/dev/null | xargs wc -l | awk ' \
		$$2 != "total" { n = split($$2, part, "/"); key = n > 2 ? part[1] "/" part[2] : part[1]; \
		  lines[key] += $$1; all += $$1 } \
		END { for (key in lines) printf "%7d  %s\n", lines[key], key | "sort -k2"; \
		  close("sort -k2"); printf "%7d  total\n", all }'
