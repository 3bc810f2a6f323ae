# Two commands are enough on a machine that has git, make and python3-venv:
#   make demo    make test
# Environments are built by .ci/env.sh. A stamp file inside .venv says that it finished; a run that
# was interrupted leaves no stamp and is done again.

SHELL := bash
PYTHON ?= python3
TORCH ?= torch==2.13.0
PROMPT ?= Explain in two sentences why the sky is blue.
PYTEST_ARGS ?= -n 2 -m "not slow"
BENCH_ARGS ?=
ASCEND_ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python

export PYTHON TORCH PROMPT KEEP_TORCH

# A torch that was asked for is looked at even when the environment is finished.
ASKED := $(if $(filter command% environment%,$(origin TORCH)),force)
KEEP_TORCH := $(if $(ASKED),no,yes)

.DEFAULT_GOAL := help
.PHONY: help demo test test-ascend lint bench wheel env clean distclean force

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.demo-ready  ## stream a reply from SmolLM2-135M-Instruct (PROMPT="...")
	@$(RUN) -m model.generate --prompt "$$PROMPT"

test: $(VENV)/.dev-ready  ## run the test suite but its slow tests (PYTEST_ARGS="-n 2" runs all)
	@$(RUN) -m pytest --ignore=tests/ascend $(PYTEST_ARGS)

test-ascend: $(VENV)/.dev-ready  ## check every kernel with triton-ascend and Huawei's compiler (ASCEND_ARGS, no NPU)
	@bash tests/ascend/setup.sh
	@TKERNELS_DEVICE=compile:ascend910b .venv-ascend/bin/python -m pytest tests/ascend -q $(ASCEND_ARGS)

lint: $(VENV)/.dev-ready  ## ruff check, ruff format --check, mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

bench: $(VENV)/.dev-ready  ## time the kernels on this machine's device (BENCH_ARGS="--kernel rope")
	@$(RUN) -m bench $(BENCH_ARGS)

wheel: $(VENV)/.dev-ready  ## build dist/tkernels-*.whl
	@rm -rf build dist
	@$(RUN) -m build --wheel --quiet
	@ls dist/*.whl

env: $(VENV)/.dev-ready  ## make the development environment and do nothing else

clean:  ## remove build outputs and caches
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean  ## remove the environments too
	@rm -rf .venv .venv-ascend

$(VENV)/.demo-ready: pyproject.toml .ci/env.sh $(ASKED)
	@bash .ci/env.sh demo

$(VENV)/.dev-ready: pyproject.toml .ci/env.sh $(ASKED)
	@bash .ci/env.sh dev
