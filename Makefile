# Three commands to know: make serve, make test, make format.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.installed
IMPORTED := $(VENV)/.imported
TORCH := torch==2.13.0
CODE := configs examples kernels runner server speculators tests
ARGS ?=
# The tests start many processes. Without compiled modules on disk, each would spend seconds compiling torch and transformers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test lint types pytest format docs setup setup-gpu clean

serve: setup  ## start the server; pass flags with make serve ARGS="--port 9000"
	@$(BIN)/slipstream serve $(ARGS)

test: lint  ## everything that CI checks; the type checker runs in parallel with the tests
	@$(MAKE) --no-print-directory --jobs 2 types pytest

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: setup
	nice -n 3 $(BIN)/mypy

# One thread per process, because the tests' models are tiny and more threads slow them down. Three processes share the tests by folder
# (PARTS in tests/conftest.py); the one with the whole servers comes first for the processor, before the other two and the type checker.
# make pytest ARGS="tests/runner -x" runs a selection, and ARGS="-m slow" runs the long forms of tests that run here in a short form.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ALL := -m "not slow" --numprocesses 3 --dist loadgroup --max-worker-restart 0
pytest: $(IMPORTED)
	$(PYTEST) $(or $(ARGS),$(ALL))

format: setup  ## format the code with ruff
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: setup  ## update docs/flags.md
	$(BIN)/python -m slipstream.configs.load > docs/flags.md

setup: $(STAMP)

# The largest packages are imported once, so that the test processes that start together do not each compile them. The type checker,
# which has one core, does not wait for it.
$(IMPORTED): $(STAMP)
	@$(BIN)/python -c 'import xgrammar' || true
	@touch $@

# torch, a build marked +cpu if pip finds one, is installed beside all other packages, which two more processes share, because pip waits
# for the index package by package. If pip finds no such build, torch is PyPI's own, which is a CPU build on macOS and the CUDA build on
# x86-64 Linux. All other packages are exactly those in constraints.txt: without dependency resolution, none can install another torch,
# CUDA packages or a compiler. PyPI's torch may replace some of them, which are installed again. pip does not compile modules
# (--no-compile), because Python compiles each on its first import. The pip of $(PYTHON) installs the environment's, if it can, because
# `ensurepip` takes longer.
PINNED := --no-compile --no-deps
HALVES := $(VENV)/constraints-0.txt $(VENV)/constraints-1.txt
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Slipstream needs Python 3.11 or later; name one: make PYTHON=python3.12 serve" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	@echo "Setting up $(VENV) (a few minutes, once) ..."
	@pip=$$(grep '^pip==' constraints.txt); \
	  $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check --quiet install "$$pip" 2>/dev/null \
	  || { $(BIN)/python -m ensurepip > /dev/null && $(PIP) install "$$pip"; }
	@awk '!/^(#|torch==)/ { print > ("$(VENV)/constraints-" (++n % 2) ".txt") }' constraints.txt
	@$(PIP) install $(PINNED) "$(TORCH)+cpu" 2>/dev/null & torch=$$!; \
	  printf '%s\n' $(HALVES) | xargs -n 1 -P 2 $(PIP) install $(PINNED) --requirement || exit 1; \
	  wait $$torch || { \
	    echo "pip found no CPU build of torch; installing PyPI's own (see README, 'A CPU build of torch')."; \
	    $(PIP) install "$(TORCH)" && $(PIP) install $(PINNED) $(addprefix --requirement ,$(HALVES)); }
	@$(PIP) install $(PINNED) --no-build-isolation --editable .
	@$(BIN)/python -m slipstream.kernels.cpu.build
	@touch $@

# For a CUDA machine. sgl-flash-mla requires a newer torch than it needs, so it is installed separately without dependencies.
setup-gpu:
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints-gpu.txt torch triton
	grep -vE '^(torch|triton)==' constraints.txt > $(VENV)/constraints-rest.txt
	$(PIP) install --no-compile --no-deps --requirement $(VENV)/constraints-rest.txt
	$(PIP) install --constraint constraints-gpu.txt --constraint $(VENV)/constraints-rest.txt \
	  --no-build-isolation --editable '.[gpu]'
	$(PIP) install --no-compile --no-deps --constraint constraints-gpu.txt sgl-flash-mla
	@touch $(STAMP)

clean:  ## remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
