# make demo, make test, make lint, make parity. Choices, all optional:
#   PYTHON=python3.13   the Python to make .venv with
#   EXTRA=cuda12        the extras to install: cpu, or cuda12, cuda13, triton, parity with commas between
#   JAX=0.11.2          the exact release of jax and jaxlib
#   PROMPT="..."        what make demo says to the model
#   ARGS="..."          more arguments, for jaxfuse generate, pytest or jaxfuse parity
# scripts/make-venv reads the first three from its environment.
PROMPT = The letter came at breakfast, and Emma read it twice before she spoke.
ARGS =
sources = $(wildcard jaxfuse kernels tests bench)
# As it was typed: make would expand a $ in it.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: help demo test parity lint format venv venv-dev
# Two installations at once would spoil .venv.
.NOTPARALLEL:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: venv
	@printf '> %s\n' "$$PROMPT" >&2
	@.venv/bin/jaxfuse generate "$$PROMPT" $(ARGS)

# A file's tests stay in one process, since they share what is dear to make. The command pytest, not python -m pytest, which would make the folder kernels/ importable as a top-level module.
test: venv-dev
	.venv/bin/pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(ARGS)

parity: venv-dev
	@.venv/bin/jaxfuse parity $(ARGS)

lint: venv-dev
	.venv/bin/ruff check $(sources)
	.venv/bin/ruff format --check $(sources)
	.venv/bin/mypy $(filter-out kernels,$(sources))

format: venv-dev
	.venv/bin/ruff check --fix $(sources)
	.venv/bin/ruff format $(sources)

venv:
	@scripts/make-venv

venv-dev:
	@scripts/make-venv dev
