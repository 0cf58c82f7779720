# Two commands: `make demo` and `make test`. Each does its own set-up; a second run reuses it.
PYTHON ?= python3
VENV ?= .venv
MODELS := smollm2-135m-instruct whisper-base whisper-tiny.en
BIN := $(VENV)/bin

.PHONY: demo test unit lint setup clean

demo: setup
	$(BIN)/python -m scripts.demo

test: setup lint
	$(BIN)/python -m pytest tests

unit: setup
	$(BIN)/python -m pytest tests/unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.installed
	@$(BIN)/sglang-ext models fetch $(MODELS)

$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; name one with: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV)
