# Everything runs inside .venv, which the targets make themselves. Each step of the setup leaves a stamp when it has
# succeeded, and only then: an interrupted step is simply run again, and a changed file re-runs the steps behind it.

SHELL := /bin/bash
.DEFAULT_GOAL := help
# The steps write into one environment; make's own parallelism would interleave them.
.NOTPARALLEL:

PYTHON ?= python3
export PYTHON

BIN := .venv/bin
STAMPS := .venv/stamps
NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f)

# An environment whose interpreter is gone (upgraded, or half made) is no environment: forget its stamps.
$(shell test -x $(BIN)/python || rm -rf $(STAMPS))

# BLAS threads that wait by spinning slow down beside any other load: measured on two cores with a neighbour burning one,
# 20 tokens/s on the reference tier, and 33 if they soon go to sleep; 50 instead of 55 on a quiet machine.
DEMO_THREADS := OPENBLAS_THREAD_TIMEOUT=4

.PHONY: help demo serve app app-shots app-recordings records records-serve test test-long test-mutants kernels-report test-races lint format model docs docs-test loc setup clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: setup ## generate on both tiers with a real model and compare them, token by token
	@$(DEMO_THREADS) $(BIN)/python -m reference.frontend.demo

serve: setup ## serve an OpenAI-compatible API on port 8000; SERVE="--port 9000" adds options
	@$(DEMO_THREADS) $(BIN)/twinfer serve $(SERVE)

app: setup $(STAMPS)/app ## show every block and every step of real runs in the browser
	@$(BIN)/python -m app

app-shots: setup $(STAMPS)/app $(STAMPS)/dev ## write a picture of each lesson of the app to build/app-shots
	@tools/setup.sh browser && $(BIN)/python tools/app_shots.py build/app-shots

app-recordings: setup $(STAMPS)/app $(STAMPS)/dev ## play lessons of the app into the looping pictures of the tutorial (a minute)
	@tools/setup.sh browser && $(BIN)/python tools/app_recordings.py

RECORDED := roofline throughput latency seqs blocksize prefix startup

records: setup $(STAMPS)/dev model ## on a quiet machine: measure everything anew for docs/performance.md
	@uptime; for name in $(RECORDED); do \
	  $(BIN)/twinfer bench $$name --save docs/benchmarks/$$(date -I)-$$name || exit 1; done

SERVED := --base-url http://127.0.0.1:8321
records-serve: setup $(STAMPS)/dev model ## the same for a server under load, with docs/images/serve.png
	@uptime; mkdir -p build; $(DEMO_THREADS) $(BIN)/twinfer serve --port 8321 --no-access-log >build/serve.log 2>&1 & trap "kill $$!" EXIT; \
	  until $(BIN)/twinfer bench health $(SERVED) --seconds 0.1 >/dev/null 2>&1; do \
	    kill -0 $$! || { cat build/serve.log; exit 1; }; sleep 1; done; \
	  to=docs/benchmarks/$$(date -I); $(BIN)/twinfer bench health $(SERVED) --save $$to-health && \
	  $(BIN)/twinfer bench serve $(SERVED) --request-rate 0.25 0.5 1 2 4 --num-prompts 32 --save $$to-serve && \
	  cp $$to-serve.png docs/images/serve.png

test: setup $(STAMPS)/app $(STAMPS)/dev $(STAMPS)/web $(STAMPS)/nvcc model ## ruff, mypy and all test suites; SUITES="spec kernels" runs only those
	@tools/setup.sh browser
	@$(BIN)/python tools/run_tests.py $(SUITES)

# An hour of two cores; each failure is made small and kept in .fuzz.
LONG := TWINFER_FUZZ_WORKLOADS=5000 TWINFER_RULE_STEPS=1000000

test-long: setup $(STAMPS)/dev model ## 5,000 random workloads and 1,000,000 steps of the property machine
	@$(LONG) $(BIN)/python tools/run_tests.py differential property

test-mutants: setup $(STAMPS)/dev ## plant known bugs one by one; the tests named for each must fail
	@$(BIN)/python tools/run_mutants.py

kernels-report: setup $(STAMPS)/nvcc ## registers, memory, occupancy, instructions and traffic of every CUDA kernel
	@$(BIN)/python -m tools.kernels_report build && $(BIN)/twinfer bench kernels

test-races: setup $(STAMPS)/dev ## CUDA kernels under ThreadSanitizer and AddressSanitizer (a minute)
	@$(BIN)/python tools/run_tests.py races

lint: setup $(STAMPS)/app $(STAMPS)/dev ## ruff and mypy only
	@$(BIN)/python tools/run_tests.py lint

format: $(STAMPS)/dev ## let ruff rewrite the Python files
	@$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format .

model: setup ## fetch the embedded model (93 MB) into the user's cache folder and check it
	@$(BIN)/python -m reference.frontend.model_store

docs: setup $(STAMPS)/dev $(STAMPS)/web model ## build the tutorial site into site/ and serve it on loopback
	@PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

docs-test: setup $(STAMPS)/dev $(STAMPS)/web model ## the tutorial alone: strict build, snippets, exercises (solutions pass, stubs fail)
	@tools/setup.sh browser
	@$(BIN)/python tools/run_tests.py docs

loc: $(STAMPS)/dependencies ## lines of code against the budgets
	@$(BIN)/python tools/loc.py

setup: $(STAMPS)/extension ## make .venv, install the dependencies, build the extension
	@:

clean: ## remove build outputs and caches
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis $(STAMPS)/extension
	@find reference fast app tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv; the fetched model stays in the user's cache folder
	@rm -rf .venv

$(STAMPS)/venv:
	@tools/setup.sh venv

$(STAMPS)/dependencies: pyproject.toml constraints.txt | $(STAMPS)/venv
	@tools/setup.sh dependencies

$(STAMPS)/extension: $(STAMPS)/dependencies $(NATIVE_SOURCES)
	@tools/setup.sh extension

$(STAMPS)/app: $(STAMPS)/dependencies
	@tools/setup.sh app

$(STAMPS)/dev: $(STAMPS)/dependencies
	@tools/setup.sh dev

$(STAMPS)/web: tools/web_packages.py | $(STAMPS)/dependencies
	@tools/setup.sh web

$(STAMPS)/nvcc: pyproject.toml constraints.txt tools/cuda_toolkit.py | $(STAMPS)/dependencies
	@tools/setup.sh nvcc
