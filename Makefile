# make demo: install, then train a small GPT on the XLA engine.   make test: install, then test.
# Both keep stamps under .venv, so that a repeat does only what has changed.

# ENGINE=jax: an installation without torch_xla (PyTorch 2.13), in a virtual environment of its own.
ENGINE ?= xla
ifeq ($(ENGINE),jax)
VENV := .venv-jax
EXTRAS := jax,hf,dev
export FUNCACC_TEST_ENGINES := jax
TESTS := $(addprefix tests/test_,$(addsuffix .py,jax engines train families ownership loops random \
  optimizers remat faults resume saving several))
else
VENV := .venv
EXTRAS := xla,hf,trainer,examples,integrations,docs,dev
TESTS :=
# JAX beside torch_xla, for the tests of both: the jax engine's run in a process of their own.
BESIDE := $(VENV)/.beside
BESIDE_TESTS := $(addprefix tests/test_,jax.py crossing.py)
endif
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTED := $(VENV)/.tested
PYTHON ?= $(shell for p in python3.11 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
TESTS_READ := $(shell find funcacc tests docs examples README.md pyproject.toml \
  -name __pycache__ -prune -o -print 2>/dev/null)

# Tracing, which takes most of the tests' time, uses one core.
TEST_PROCESSES ?= -n 2

export PJRT_DEVICE ?= CPU

.PHONY: help install demo test retest bench lint format clean

help:
	@echo 'make demo     train a small GPT on the XLA engine (under 5 minutes), into runs/demo'
	@echo 'make test     run the tests, unless they passed and nothing has changed since'
	@echo 'make retest   run the tests (PYTEST_ARGS="-k name" for some of them)'
	@echo 'make bench    compare with other libraries (about an hour; BENCH_ARGS="--work small-mlp" for less)'
	@echo 'make lint     ruff and mypy;  make format: let ruff rewrite;  make clean: remove .venv'
	@echo 'ENGINE=jax    behind demo, test or retest: on the jax engine, in a lighter installation'

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints/$(ENGINE).txt
	@test -n '$(PYTHON)' || { echo 'funcacc needs Python 3.10 or newer (python3.11 or python3)' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
	  -c constraints/$(ENGINE).txt -e '.[$(EXTRAS)]'
	@touch $@

.venv/.beside: $(INSTALLED) constraints/jax-beside-xla.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet \
	  -c constraints/xla.txt -c constraints/jax-beside-xla.txt -e '.[jax]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/funcacc train --engine $(ENGINE) --out runs/demo$(if $(filter jax,$(ENGINE)),-jax) --resume $(DEMO_ARGS)

test: $(TESTED)
	@echo 'The tests passed for the files as they are; "make retest" runs them again.'

$(TESTED): $(INSTALLED) $(BESIDE) $(TESTS_READ)
	$(BIN)/python -m pytest $(TEST_PROCESSES) $(TESTS)
	$(if $(BESIDE),FUNCACC_TEST_ENGINES=jax $(BIN)/python -m pytest $(TEST_PROCESSES) $(BESIDE_TESTS))
	@touch $@

retest: $(INSTALLED)
	$(BIN)/python -m pytest $(TEST_PROCESSES) $(TESTS) $(PYTEST_ARGS)

bench: $(INSTALLED)
	$(BIN)/funcacc bench --jax 0.7.1 latest $(BENCH_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-jax
