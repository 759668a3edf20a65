# The commands of the house. Each works in a fresh clone, as root or as a plain user, with nothing set.
#   make setup   everything the other targets need: .venv, and the programs weir runs
#   make demo    the five-minute story: three regions, a canary, a region lost and healed
#   make test    lint, types, import contracts, all tests (what CI runs)
#   make check   the same without tests that start real programs: under a minute
#   make lock    renew requirements.lock from pyproject.toml
#   make clean   remove .venv and caches (not the user's cache of programs: ~/.cache/weir)

MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev test check lint demo lock clean

VENV := .venv/bin

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@.ci/setup.sh
	@$(VENV)/python -m mesh.tools_cli setup --quiet

setup-dev: setup
	@$(VENV)/python -m mesh.tools_cli setup --dev --with torch --quiet
	@$(VENV)/weir model prepare smollm2-135m-instruct >/dev/null

lint:
	@echo '== ruff check'; $(VENV)/ruff check .
	@echo '== ruff format'; $(VENV)/ruff format --check .
	@echo '== mypy'; $(VENV)/mypy
	@echo '== import contracts'; $(VENV)/lint-imports

test: setup-dev
	@$(MAKE) lint
	@echo '== tests'; $(VENV)/python -m pytest $(PYTEST_ARGS)

check: setup
	@$(MAKE) lint
	@echo '== tests (fast)'; $(VENV)/python -m pytest -q -m 'not real and not slow' $(PYTEST_ARGS)

demo: setup
	@exec $(VENV)/weir demo

lock:
	@.ci/lock.sh

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
