# Sets up .venv once, then trains, checks or tests in it. `make help` lists what there is.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
RESULTS = tests/results/$(shell date -u +%Y-%m-%d)-$(shell git rev-parse --short HEAD).txt

.PHONY: help quickstart check test test-all test-gpu campaign proofs long-run wheel site

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|'
	@echo 'PIP_ARGS="..." passes arguments to pip, such as your own index; PYTHON=... picks the interpreter (3.10 or newer).'

quickstart: $(VENV)/.installed-quickstart ## train the quickstart recipe on two processes of this machine
	$(VENV)/bin/python -m recipes.quickstart.run

check: $(VENV)/.installed-test ## lint, format and types
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

test: check ## check, then every test but the long forms
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q -n 4 -m 'not full' --durations=10

test-all: check ## check, then every test; the dated output goes to tests/results/
	@mkdir -p tests/results
	@{ date -u +'%Y-%m-%d %H:%M UTC'; git log -1 --format='commit %h: %s'; $(VENV)/bin/flowtrain doctor; \
	   OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q -n 3 --durations=20; } 2>&1 | sed -u 's#$(CURDIR)/##g' | tee $(RESULTS)

test-gpu: $(VENV)/.installed-test ## what to run first on a GPU, in three calls of ten minutes; CALL=1 runs the first one alone
	$(VENV)/bin/python -m tests.on_a_gpu $(CALL)

campaign: $(VENV)/.installed-test ## 1,000 random faults, for hours; goes on where it was stopped
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.faults.campaign

proofs: $(VENV)/.installed-test ## 10,000 damaged checkpoints, broken records and broken images; goes on where it was stopped
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.checkpoint.damaged
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.data.broken_records
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.data.broken_images

long-run: $(VENV)/.installed-test ## 30,000 steps: what each rank holds all along, beside plain Lightning; goes to tests/results/
	@{ date -u +'%Y-%m-%d %H:%M UTC'; git log -1 --format='commit %h: %s'; \
	   OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.faults.long_run; } | tee tests/results/long-run.txt

wheel: $(VENV)/.installed-test ## build the wheel, install it into an environment of its own, and train by it there
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -q tests/test_wheel.py

site: $(VENV)/.installed-docs ## build the pages into site/, strictly
	$(VENV)/bin/mkdocs build --strict

$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python %d.%d is too old; set PYTHON to 3.10 or newer." % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q $(PIP_ARGS) -e '.[$*]'
	@touch $@
