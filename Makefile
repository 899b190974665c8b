# The menu. Each target uses what the PATH has: activate an environment first.

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

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

test:  ## the tests, in about three minutes
	pytest -n auto

bench:  ## correctness and speed against the reference and what a user would pick instead
	pytest benchmarks

tables:  ## the tables and pictures of the pages, from the results in benchmarks/
	python benchmarks/pages.py

demo:  ## every operation checked and timed, then a small translator trained and used
	fastattn demo

slow:  ## the longer tests, three at a time, since some wait: every instruction set, sanitizers, fresh installs
	FASTATTN_CPU_BUILD=all python setup.py build_ext --inplace
	OMP_NUM_THREADS=1 pytest -m "slow and not triton" -n 3 --dist worksteal --durations 30

triton:  ## Triton's kernels at length: every test in the interpreter, every kernel compiled for every architecture
	pytest -m triton

aot-gate:  ## Triton's kernels compiled for every architecture and examined, with no GPU
	python tools/aot_gate.py

compile-gate:  ## the CUDA C++ kernels compiled for several architectures and examined, with no GPU
	python tools/compile_gate.py

dry-launch:  ## every operation on CUDA tensors down to a driver that starts nothing
	python tools/dry_launch.py 40 1 16 33 48 63 64 100 256 1000

planted-faults:  ## whether the gates and the emulation find the faults planted for them
	pytest -m slow -k planted

docs:  ## the documentation as a site, in site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build

dist:  ## sdist and wheel in dist/, and whether an index would take them
	rm -rf dist
	FASTATTN_BUILD=1 FASTATTN_CPU_BUILD=all python -m build --no-isolation
	python -m twine check --strict dist/*

wheels:  ## the release in dist/: the sdist, and wheels for x86-64 and aarch64 that need no compiler
	python tools/wheels.py

presets:  ## the table of presets in docs/training.md
	python tools/presets.py

torch-versions:  ## what depends on torch's version, on the oldest and the newest
	python tools/torch_versions.py

ci:  ## all that comes after the tests: lint docs dist slow torch-versions report, each with its time
	@python tools/torch_versions.py --prepare & \
	for target in lint docs dist slow torch-versions report; do \
		test $$target != torch-versions || wait; \
		start=$$(date +%s); $(MAKE) $$target || exit; echo "$$target: $$(($$(date +%s) - start)) s"; \
	done

report:  # some of the benchmarks where neighbours disturb: only wrong results fail
	pytest benchmarks --report -k "dispatch or memory or floor and bfloat16"

.PHONY: help install lint format test bench tables demo slow triton aot-gate compile-gate dry-launch planted-faults docs \
	dist wheels presets torch-versions ci report
