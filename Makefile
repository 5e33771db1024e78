# make demo | test | lint | bench | clean. Needs make and Python 3.11 or newer; everything else is installed
# into .venv (run time: demo), .venv-test (torch, pytest, linters: test, lint, bench) or .venv-server (tritonserver,
# as `pip install 'dflash-trt[triton-local]'` brings it, which wants an older numpy: test).

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

# The first interpreter that really runs (a pyenv shim may exist and fail), is new enough and can create a venv.
RUNS := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c '$(RUNS)' 2>/dev/null && echo $$p && break; done)
PIP := -m pip --disable-pip-version-check install --quiet --quiet
TORCH := $(shell grep -om1 'torch==[0-9.]*' pyproject.toml)

help:
	@echo 'make demo    build the shipped pair; the same tokens with and without drafting, and the speedup'
	@echo 'make test    run the tests (installs torch into .venv-test)'
	@echo 'make lint    ruff and mypy'
	@echo 'make bench   plain decoding, drafting and Transformers on the shipped pair'
	@echo 'make clean   remove the environments and caches; bundles stay'

demo: .venv/installed
	@.venv/bin/python build_scripts/demo.py

test: .venv-test/installed .venv-server/installed
	@.venv-test/bin/python -m pytest
	@.venv-server/bin/python -m pytest server_tests

lint: .venv-test/installed
	@.venv-test/bin/ruff check .
	@.venv-test/bin/ruff format --check .
	@.venv-test/bin/mypy

bench: .venv-test/installed
	@.venv-test/bin/python build_scripts/bench_decode.py

clean:
	rm -rf .venv .venv-test .venv-server build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dflash_trt build_scripts tests -name __pycache__ -prune -exec rm -rf {} +

# The stamp is touched last, so that an interrupted installation is done again.
.venv/installed: pyproject.toml
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --editable .
	@touch $@

# torch first and alone: pip then takes the CPU wheel where its configuration offers one.
.venv-test/installed: pyproject.toml
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) $(TORCH)
	@$(@D)/bin/python $(PIP) --editable '.[test,dev,tensorrt-rtx,quantize]'
	@touch $@

.venv-server/installed: pyproject.toml
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --editable '.[test-server]'
	@touch $@

define venv
	@test -n '$(PYTHON)' || { echo 'make: no Python 3.11 or newer with venv and ensurepip found;' \
	    'install one (on Debian also python3-venv) or name it: make PYTHON=/path/to/python'; exit 1; } >&2
	@'$(PYTHON)' -c '$(RUNS)' || { echo 'make: $(PYTHON) does not run, is older than 3.11 or lacks venv' >&2; exit 1; }
	@$(1)/bin/python -c 'import pip' 2>/dev/null || '$(PYTHON)' -m venv --clear $(1)
	@echo "installing into $(1), $$($(1)/bin/python --version) (once; again when pyproject.toml changes)" >&2
endef
