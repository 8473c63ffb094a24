# Each target makes .venv by itself when it is missing or older than what it is made from.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
C_SOURCES := $(wildcard src/page4/kernels/cpu/*.[ch] src/page4/kernels/cuda/*.cu src/page4/kernels/cuda/*.cuh)

.DEFAULT_GOAL := help
.PHONY: help demo test lint gpu-test

help:
	@echo "make demo   set up $(VENV), calibrate the embedded checkpoint and run it over E4M3 K/V with MTP"
	@echo "make test   set up $(VENV) and run the tests"
	@echo "make gpu-test  run the tests of the kernels on this machine's GPU, with PYTHON as it is (no $(VENV))"
	@echo "make lint   set up $(VENV) and run ruff, clang-format, mypy and import-linter"

$(STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/page4 demo

test: $(STAMP)
	$(BIN)/pytest -q -n auto

# A GPU machine brings its own torch, Triton and CUDA: nothing is installed here.
gpu-test:
	PYTHONPATH="src:$$PYTHONPATH" $(PYTHON) -m pytest -q -p no:cacheprovider tests/kernels tests/test_attend.py tests/test_select.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
