# Vireo's commands; `make` alone lists them.
#
# Every target first sets up what it needs in $(VENV) and calls pip only when something changed.
# Settings, given after the target (`make test VENV=/somewhere/venv`):
#   VENV     the environment's folder
#   PYTHON   the interpreter that makes a new environment (an existing one keeps its own)
#   WORKERS  how many processes run the tests
#   ARGS     more words for the command, as in `make test ARGS="-k packing -x"`

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

# Older releases of the packages that matter most, tested by `make test-compat`, and the packages
# whose pins in constraints.txt follow from them.
COMPAT := torch==2.11.0 torchvision==0.26.0 transformers==5.12.1 \
  tokenizers==0.22.2 huggingface_hub==1.33.0
FOLLOWERS := torch|torchvision|triton|setuptools|nvidia-.*|cuda-.*|transformers|tokenizers|huggingface_hub
PINS ?=

ROOT := $(CURDIR)
VENV_DIR := $(if $(filter /%,$(VENV)),$(VENV),$(ROOT)/$(VENV))
BIN := $(VENV_DIR)/bin
# What an environment is made from: the same key, the same packages.
KEY = $(shell { cat constraints.txt pyproject.toml; echo '$(PINS)'; } | sha256sum | cut -c1-16)
# Tests and the demo need no network and say so.
RUN := PATH="$(BIN):$$PATH" HF_HUB_OFFLINE=1
PYTEST := $(RUN) OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest

.PHONY: help setup key demo demo-rl lint format test test-all test-gpu test-compat functional clean \
  clean-all

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: setup ## set everything up, then train a small model from end to end on the CPU
	@$(RUN) "$(BIN)/vireo" demo $(ARGS)

demo-rl: setup ## the same by GRPO: fine-tune until it is right now and then, go on by rewards
	@$(RUN) "$(BIN)/vireo" demo --rl $(ARGS)

test: setup ## the tests that run anywhere in minutes
	@$(PYTEST) -n $(WORKERS) -m "not slow and not gpu" $(ARGS)

test-all: setup ## these and the long grids
	@$(PYTEST) -n $(WORKERS) -m "not gpu" $(ARGS)

test-gpu: setup ## the tests that need a CUDA device
	@$(PYTEST) -m gpu $(ARGS)

test-compat: ## `make test` on older releases, in .venv-compat: torch 2.11, transformers 5.12
	@$(MAKE) test VENV=.venv-compat PINS="$(COMPAT)"

functional: setup ## short training runs of six recipes, their numbers held against files
	@$(RUN) OMP_NUM_THREADS=1 "$(BIN)/python" -m tests.functional $(ARGS)

lint: setup ## ruff check, ruff format --check and mypy; all three run, any finding fails
	@status=0
	"$(BIN)/ruff" check . || status=1
	"$(BIN)/ruff" format --check . || status=1
	"$(BIN)/mypy" || status=1
	exit $$status

format: setup ## let ruff format the code and mend what it can
	@"$(BIN)/ruff" check --fix --exit-zero .
	"$(BIN)/ruff" format .

# The environment's own notes, in $(VENV_DIR)/.vireo:
#   ready       the key and the path it was finished with, written last
#   source      the checkout that its `vireo` command runs
#   installing  stands while pip works: one found later means an install that was cut short
#               (not one that pip gave up by itself: pip leaves those as they were)
#   lock        one set-up at a time
# Only an environment that this recipe began is ever emptied; one made by hand is added to.
setup: ## bring the environment up to date
	@[ -n '$(VENV)' ] || { echo "VENV is empty; give it a folder, e.g. VENV=.venv" >&2; exit 2; }
	env="$(VENV_DIR)"; notes="$$env/.vireo"; stamp="$(KEY) $$env"; began=$$SECONDS
	mkdir -p "$$notes"
	exec 9> "$$notes/lock"
	flock 9
	note() { cat "$$notes/$$1" 2> /dev/null || true; }
	pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$$env/bin/python" -m pip install -q --no-input "$$@"; }
	if [ "$$(note ready)" = "$$stamp" ] && [ -x "$$env/bin/python" ]; then
	  if [ "$$(note source)" != "$(ROOT)" ]; then
	    echo "$(VENV): now runs the code in $(ROOT)"
	    rm -f "$$notes/source"
	    pip --no-deps --no-build-isolation -e .
	    echo "$(ROOT)" > "$$notes/source"
	  fi
	  exit 0
	fi
	again=
	if [ -e "$$notes/installing" ]; then
	  again="an install here was cut short"
	elif [ -e "$$notes/ready" ] && [ ! -x "$$env/bin/python" ]; then
	  again="its Python is gone"
	elif [ -e "$$notes/ready" ] && [[ "$$(note ready)" != *" $$env" ]]; then
	  again="it was made in another folder and moved"
	fi
	if [ -n "$$again" ] || [ ! -x "$$env/bin/python" ]; then
	  found="$$("$(PYTHON)" -c 'import platform, sys; print(platform.python_version());
	sys.exit(sys.version_info < (3, 11))' 2> /dev/null)" || {
	    echo "$(PYTHON): found Python $${found:-none}, expected 3.11 or newer;" \
	      "name another one: make setup PYTHON=python3.11" >&2
	    exit 2
	  }
	fi
	trap 'exit 130' INT TERM
	touch "$$notes/installing"
	rm -f "$$notes/ready" "$$notes/source"
	if [ -n "$$again" ]; then
	  echo "$(VENV): $$again: starting over"
	  find "$$env" -mindepth 1 -maxdepth 1 ! -name .vireo -exec rm -rf {} +
	fi
	if [ -x "$$env/bin/python" ]; then
	  echo "$(VENV): bringing it up to date"
	else
	  echo "$(VENV): installing (about 6 GB with a CUDA build of torch; this takes minutes)"
	  "$(PYTHON)" -m venv "$$env"
	fi
	pins="$(ROOT)/constraints.txt"
	if [ -n '$(PINS)' ]; then
	  pins="$$notes/constraints.txt"
	  { grep -vE '^($(FOLLOWERS))==' constraints.txt; printf '%s\n' $(PINS); } > "$$pins"
	fi
	pip -c "$$pins" 'setuptools>=77' && pip -c "$$pins" --no-build-isolation -e '.[dev]' || {
	  rm -f "$$notes/installing"
	  echo "$(VENV): pip failed as printed above; mend that and run the same command again" >&2
	  exit 1
	}
	echo "$(ROOT)" > "$$notes/source"
	echo "$$stamp" > "$$notes/ready"
	rm -f "$$notes/installing"
	echo "$(VENV): ready after $$((SECONDS - began)) s"

key: # what a cache of environments may be keyed by
	@echo $(KEY)

clean: ## remove caches and build outputs; environments and runs stay
	@rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . \( -name '.venv*' -o -path ./.git -o -path ./runs -o -path ./data \) -prune \
	  -o -type d -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean ## remove the environments .venv and .venv-compat as well
	@rm -rf .venv .venv-compat
