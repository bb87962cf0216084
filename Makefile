# Four commands: make train, make test, make bench, make check. Each sets up what it needs.
#
# TORCH is what is installed where no torch is there; point it at a CPU wheel where one is at hand:
#   make train TORCH=./torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl
# WORKERS is how many processes share out the files of the tests; 0 is one after the other.
TORCH ?= torch==2.13.0
WORKERS ?= 2
PYTHON ?= python3
BIN = .venv/bin

# The reinstall compiles csrc/ again, so it follows the sources; Python files are used in place.
BUILD_INPUTS = pyproject.toml setup.py MANIFEST.in $(wildcard _backend/*.py) \
	$(wildcard csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh)
NEEDS = .venv/.installed
NEEDS_DEV = .venv/.installed-dev

TRAIN_FLAGS = --preset tiny --dp 2 --tp 2 --pp 2
# A run folder that holds a run is refused, so each make train takes the next free number.
RUN_DIR ?= $(shell n=1; while [ -e runs/tiny-$$n ]; do n=$$((n + 1)); done; echo runs/tiny-$$n)

.PHONY: train test test-slow tsan asan bench memory-ladder check format clean gpu-check cubins

train: $(NEEDS)
	@run_dir="$(RUN_DIR)" && \
	$(BIN)/mcp-parallel train $(TRAIN_FLAGS) --run-dir "$$run_dir" && \
	$(BIN)/mcp-parallel generate "$$run_dir" --prompt "def " --max-new-tokens 200

test: $(NEEDS_DEV) .venv/.browser
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: $(NEEDS_DEV)
	$(BIN)/python -m pytest -m slow

# The shared-memory protocol with threads as ranks, under ThreadSanitizer.
tsan: $(NEEDS_DEV)
	$(BIN)/python -m pytest -m slow tests/test_shm_tsan.py

# Everything compiled, under AddressSanitizer and UndefinedBehaviorSanitizer: a build of its own.
asan: $(NEEDS_DEV)
	$(BIN)/python -m pytest -m slow tests/test_sanitizers.py
	$(BIN)/python tests/sanitized.py

bench: $(NEEDS_DEV)
	$(BIN)/python -m pytest bench -q --benchmark-enable --benchmark-only \
		--benchmark-columns=min,median,iqr,rounds

# Peak memory of a rank, rung by rung, tracked and predicted: the tables of docs/memory.md.
memory-ladder: $(NEEDS_DEV)
	$(BIN)/python bench/memory_ladder.py --write

# On a GPU machine: correctness and speed of every kernel there, written to gpu_report.json.
gpu-check: $(NEEDS)
	$(BIN)/python -m mcp_kernels.gpu_check

# Anywhere: registers, shared memory and spills of the Triton kernels on sm_80 and sm_90.
cubins: $(NEEDS_DEV)
	$(BIN)/python -m mcp_kernels.triton.flash_attn_resources
	$(BIN)/python -m mcp_kernels.triton.symmetric_resources

# Tests of the report page look at it in a browser; where none can be had they are skipped.
.venv/.browser: | $(BIN)/python
	@command -v chromedriver >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	timeout 300 sh -c "apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qqy \
	install --no-install-recommends chromium chromium-driver"; } || echo "no browser: page tests skip"
	@touch $@

SOURCES = mcp_kernels mcp_parallel tests bench _backend setup.py
CXX_SOURCES = $(wildcard csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh \
	tests/*/*.h tests/*/*.cpp)

check: $(NEEDS_DEV)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/basedpyright

format: $(NEEDS_DEV)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	rm -f mcp_kernels/*.so mcp_kernels/_build_record.json .venv/.installed .venv/.installed-dev \
		.venv/.browser

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/.torch: | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install $(TORCH)
	@touch $@

$(NEEDS): $(BUILD_INPUTS) .venv/.torch
	$(BIN)/python -m pip install -e ".[tb]"
	@touch $@

$(NEEDS_DEV): $(BUILD_INPUTS) .venv/.torch
	$(BIN)/python -m pip install -e ".[dev]"
	@touch $(NEEDS) $@
