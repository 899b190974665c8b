# The menu. Each target runs in the current environment; PYTHON=... names another.
PYTHON ?= python

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

install:  ## editable install with everything that the targets below need; torch must be there first
	$(PYTHON) -m pip install "setuptools>=77" ninja
	$(PYTHON) -m pip install --no-build-isolation -e ".[dev]"

lint:  ## ruff, mypy, clang-format: report, change nothing
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	find csrc -name '*.h' -o -name '*.cpp' | xargs clang-format --dry-run --Werror

format:  ## what lint can put right by itself
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	find csrc -name '*.h' -o -name '*.cpp' | xargs clang-format -i

test:  ## the tests, under five minutes
	$(PYTHON) -m pytest

bench:  ## correctness and speed against the reference and what a user would pick instead
	$(PYTHON) -m pytest benchmarks

demo:  ## every operation checked and timed, then a small translator trained and used
	$(PYTHON) -m fastattn.cli demo

slow:  ## the tests that install the package anew or train for minutes
	$(PYTHON) -m pytest -m slow

ci: lint bench demo slow  ## all that comes after the tests

.PHONY: help install lint format test bench demo slow ci
