# The menu. Each target uses what the PATH has: activate an environment first.

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

install:  ## editable install with everything that the targets below need; torch must be there first
	pip install "setuptools>=77" ninja
	pip install --no-build-isolation -e ".[dev]"

lint:  ## ruff, mypy, clang-format: report, change nothing
	ruff check .
	ruff format --check .
	mypy
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs clang-format --dry-run --Werror

format:  ## what lint can put right by itself
	ruff check --fix .
	ruff format .
	find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' | xargs clang-format -i

test:  ## the tests, under five minutes
	pytest

bench:  ## correctness and speed against the reference and what a user would pick instead
	pytest benchmarks

demo:  ## every operation checked and timed, then a small translator trained and used
	fastattn demo

slow:  ## the longer tests: every instruction set, sanitizers, fresh installs
	pytest -m "slow and not triton"

triton:  ## Triton's kernels at length: every test in the interpreter, every kernel compiled for every architecture
	pytest -m triton

ci: lint demo slow report  ## all that comes after the tests

report:  # the benchmarks where neighbours disturb: only wrong results fail
	pytest benchmarks --report -k "dispatch or floor"

.PHONY: help install lint format test bench demo slow triton ci report
