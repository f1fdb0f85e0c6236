# Needs only make and python3 >= 3.11 with venv; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
# what is compiled is kept, or each worker and each program that a test starts compiles it again;
# three workers for two cores, since a third of the tests' time is waiting
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/pytest -n 3 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install quickstart check docs site pictures bench-smoke test test-slow test-all

help:  ## say what there is
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(MAKEFILE_LIST) | sort

install: $(STAMP)  ## make .venv, again only if pyproject.toml or constraints.txt changed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "make: '$(PYTHON)' is not a Python 3.11 or newer with venv; name one (make PYTHON=python3.12) or install it (apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: install  ## train a small agent on this machine's CPU (ARGS="seed=1 run_dir=runs/one" overrides)
	$(VENV)/bin/agent-peft train quickstart $(ARGS)

check: install  ## lint, formatting, types, floors
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy --strict src
	$(VENV)/bin/pytest -q tests/test_architecture.py

docs: install  ## make docs/configuration.md from the configuration's classes
	$(VENV)/bin/python -m agent_peft.configuration.keys > docs/configuration.md

site: docs pictures  ## build the documentation's site in dist/site, without network
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

pictures: install  ## draw benchmarks/results/*.json into docs/pictures
	$(VENV)/bin/python benchmarks/figures.py --draw

bench-smoke: install  ## run every benchmark with small sizes, to show that it still runs
	$(VENV)/bin/python benchmarks/smoke.py

test: install  ## the fast tests and the docstrings' examples
	$(PYTEST)

test-slow: install  ## only the slow tests
	$(PYTEST) -m slow || test $$? -eq 5  # pytest's 5: there are none

test-all: test test-slow  ## every test
