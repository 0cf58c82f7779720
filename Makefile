# `make demo`, `make captions` and `make test` do their own set-up; a second run reuses it.
PYTHON ?= python3
VENV ?= .venv
MODELS := smollm2-135m-instruct whisper-base whisper-tiny.en
BIN := $(VENV)/bin

# What translates the captions page; sglang-ext models list names others, - (a dash) none.
TRANSLATE ?= qwen2.5-coder-0.5b-instruct

.PHONY: demo captions test unit lint format setup peers clean

demo: setup
	$(BIN)/python -m scripts.demo

captions: setup
	@[ "$(TRANSLATE)" = - ] || $(BIN)/sglang-ext models fetch $(TRANSLATE)
	$(BIN)/sglang-ext captions --page $(if $(filter -,$(TRANSLATE)),,--translate-model $(TRANSLATE))

# Two workers, half of the cores each, where their servers fit (20 GB): tests/lanes.py says what runs
# behind what.
WORKERS := $(shell awk '/^MemAvailable/ {print ($$2 > 22000000 ? 2 : 1)}' /proc/meminfo)
LANES := -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
TOGETHER := -n auto --dist loadfile --no-loadscope-reorder
test: lint
	$(BIN)/python -m pytest tests $(LANES)

unit: setup
	OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit $(TOGETHER)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.installed
	@$(BIN)/sglang-ext models fetch $(MODELS)

$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; name one with: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# What we compare with: docs/peers.md. Suffix decoding is a drafter, so it goes into our environment;
# llama.cpp and faster-whisper have pins of their own, so they get one of theirs.
PEERS ?= $(VENV)/peers
# GCC 12 drops stores of llama.cpp's AMX configuration without these two, and AMX then ends it.
LLAMA := -DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-dse -fno-tree-dse' -DMTMD_BUILD=OFF \
	-DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF
peers: setup $(PEERS)/.installed
	$(BIN)/pip install --disable-pip-version-check --no-deps nanobind==2.9.2 cmake==4.4.4 ninja==1.13.2 grpcio-tools==1.85.1
	@# Its CMake looks for Python and nanobind in the active environment, else on the PATH.
	VIRTUAL_ENV="$(abspath $(VENV))" PATH="$(abspath $(BIN)):$$PATH" \
		$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation arctic-inference==0.1.1

# As many compilers as cores, some 700 MB each.
$(PEERS)/.installed: scripts/peers.lock
	$(BIN)/python -m venv $(PEERS)
	CMAKE_ARGS="$(LLAMA)" CMAKE_BUILD_PARALLEL_LEVEL="$$(nproc)" \
		$(PEERS)/bin/pip install --disable-pip-version-check --no-deps \
		--no-binary llama-cpp-python -r scripts/peers.lock
	@touch $@

clean:
	rm -rf $(VENV)
