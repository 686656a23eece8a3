# Everything runs in .venv, made on first use and remade when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check

.PHONY: demo test test-slow check bench clean

demo: .venv/installed
	$(BIN)/minigen demo

test: .venv/installed-dev
	$(BIN)/python -m pytest

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-* runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# pip works on the new environment from outside, so that no python3-venv package is needed.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv --without-pip .venv
	$(INSTALL) -e '.[fast]'
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) -e '.[dev]'
	touch $@
