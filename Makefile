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

# Servers use every core: their tests come alone, behind those that can share the machine. The
# emulated server's test takes as long as hundreds of others, so its file goes first.
TOGETHER := -n auto --dist loadfile --no-loadscope-reorder
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/emulated tests/unit $(TOGETHER)
	$(BIN)/python -m pytest tests/server tests/gpu

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit $(TOGETHER)

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

# Suffix decoding, to compare with: docs/peers.md.
peers: setup
	$(BIN)/pip install --disable-pip-version-check --no-deps nanobind==2.9.2 cmake==4.4.4 ninja==1.13.2 grpcio-tools==1.85.1
	@# Its CMake looks for Python and nanobind in the active environment, else on the PATH.
	VIRTUAL_ENV="$(abspath $(VENV))" PATH="$(abspath $(BIN)):$$PATH" \
		$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation arctic-inference==0.1.1

clean:
	rm -rf $(VENV)
