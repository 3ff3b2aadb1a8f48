# Three commands to know: make serve, make test, make format.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.installed
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
	$(BIN)/mypy

# One thread per process, because the tests' models are tiny and more threads slow them down. Two processes share the tests by folder,
# and one of them starts with those that need whole servers (FIRST_HALF in tests/conftest.py). make pytest ARGS="tests/runner -x"
# runs a selection, and ARGS="-m slow" runs the long forms of tests that run here in a short form.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ALL := -m "not slow" --numprocesses 2 --dist loadgroup --max-worker-restart 0
pytest: setup
	$(PYTEST) $(or $(ARGS),$(ALL))

format: setup  ## format the code with ruff
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: setup  ## update docs/flags.md
	$(BIN)/python -m slipstream.configs.load > docs/flags.md

setup: $(STAMP)

# torch is installed first: a build marked +cpu if pip finds one, otherwise PyPI's own, which is a CPU build on macOS and the CUDA
# build on x86-64 Linux. pip does not compile modules (--no-compile), because Python compiles each on its first import. All other
# packages are exactly those in constraints.txt: without dependency resolution, none can install another torch, CUDA packages or a
# compiler.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Slipstream needs Python 3.11 or later; name one: make PYTHON=python3.12 serve" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a few minutes, once) ..."
	@$(PIP) install "$$(grep '^pip==' constraints.txt)"
	@$(PIP) install --no-compile --no-deps "$(TORCH)+cpu" 2>/dev/null || { \
	  echo "pip found no CPU build of torch; installing PyPI's own (see README, 'A CPU build of torch')."; \
	  $(PIP) install "$(TORCH)"; }
	@$(PIP) install --no-compile --no-deps --requirement constraints.txt
	@$(PIP) install --no-compile --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m slipstream.kernels.cpu.build
	@touch $@

# For a CUDA machine. sgl-flash-mla requires a newer torch than it needs, so it is installed separately without dependencies.
setup-gpu:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints-gpu.txt torch triton
	grep -vE '^(torch|triton)==' constraints.txt > $(VENV)/constraints-rest.txt
	$(PIP) install --no-compile --no-deps --requirement $(VENV)/constraints-rest.txt
	$(PIP) install --constraint constraints-gpu.txt --constraint $(VENV)/constraints-rest.txt \
	  --no-build-isolation --editable '.[gpu]'
	$(PIP) install --no-compile --no-deps --constraint constraints-gpu.txt sgl-flash-mla
	@touch $(STAMP)

clean:  ## remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
