# `make` lists what there is. Only the first run of a target installs; the next ones are quick.
# PYTHON=/path/to/python3 chooses the interpreter, ARGS="..." goes to the command.

.DEFAULT_GOAL := help
.PHONY: help lab test prove bench book build

BIN := .venv/bin

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1|/p' Makefile | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

lab: .venv/.installed  ## open the course in JupyterLab, where you are
	@$(BIN)/bertlab lab $(ARGS)

test: .venv/.installed-test  ## everything that must hold: style, types, derived files, tests
	@scripts/test.sh $(ARGS)

prove: .venv/.installed-test  ## authors: every known mistake is recognized, on 20 seeds
	@BERTLAB_SEEDS=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/course/test_exercises.py $(ARGS)

bench: .venv/.installed-test  ## the speed claims, measured on this machine
	@$(BIN)/python -m tests.bench $(ARGS)

book: .venv/.installed  ## the chapters as a website, below site/
	@$(BIN)/bertlab book $(ARGS)

build: .venv/.installed  ## authors: make the notebooks and stubs from solutions/
	@$(BIN)/bertlab build $(ARGS)

.venv/.installed: pyproject.toml constraints.txt
	@scripts/setup.sh .
	@touch $@

.venv/.installed-test: pyproject.toml constraints.txt
	@scripts/setup.sh '.[test]'
	@touch .venv/.installed $@
