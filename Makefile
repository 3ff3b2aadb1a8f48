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
	nice -n 3 $(BIN)/mypy

# One thread per process, because the tests' models are tiny and more threads slow them down. Three processes share the tests by folder
# (PARTS in tests/conftest.py); the one with the whole servers comes first for the processor, before the other two and the type checker.
# make pytest ARGS="tests/runner -x" runs a selection, and ARGS="-m slow" runs the long forms of tests that run here in a short form.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
ALL := -m "not slow" --numprocesses 3 --dist loadgroup --max-worker-restart 0
pytest: setup
	$(PYTEST) $(or $(ARGS),$(ALL))

format: setup  ## format the code with ruff
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: setup  ## update docs/flags.md
	$(BIN)/python -m slipstream.configs.load > docs/flags.md

setup: $(STAMP)

# torch, a build marked +cpu if pip finds one, is installed beside all other packages, because unpacking takes one core. If pip finds
# none, torch is PyPI's own, which is a CPU build on macOS and the CUDA build on x86-64 Linux. All other packages are exactly those in
# constraints.txt: without dependency resolution, none can install another torch, CUDA packages or a compiler. PyPI's torch may replace
# some of them, which are installed again. pip does not compile modules (--no-compile), because Python compiles each on its first
# import; the largest packages are imported here, so that the processes that start together later do not each compile them.
PINNED := --no-compile --no-deps --requirement $(VENV)/constraints-rest.txt
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Slipstream needs Python 3.11 or later; name one: make PYTHON=python3.12 serve" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a few minutes, once) ..."
	@$(PIP) install "$$(grep '^pip==' constraints.txt)"
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints-rest.txt
	@$(PIP) install --no-compile --no-deps "$(TORCH)+cpu" 2>/dev/null & torch=$$!; \
	  $(PIP) install $(PINNED) || exit 1; \
	  wait $$torch || { \
	    echo "pip found no CPU build of torch; installing PyPI's own (see README, 'A CPU build of torch')."; \
	    $(PIP) install "$(TORCH)" && $(PIP) install $(PINNED); }
	@$(BIN)/python -c 'import xgrammar' & imports=$$!; \
	  $(PIP) install --no-compile --no-deps --no-build-isolation --editable . || exit 1; \
	  $(BIN)/python -m slipstream.kernels.cpu.build && { wait $$imports || true; }
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
