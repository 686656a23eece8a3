# Everything runs in .venv, made on first use and remade when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check

.PHONY: demo test test-all test-slow test-oldest test-browser test-faults mutants docs screenshot check bench matrix clean

demo: .venv/installed
	$(BIN)/minigen demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist loadscope
	@echo "Left out: test-slow (minutes), test-oldest (the oldest libraries), test-browser (the page in \
	chromium), test-faults (kills, full disks, damage). make test-all leaves nothing out."

test-all: test check test-slow test-oldest test-browser test-faults

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

# The fingerprints again, with the oldest version of every library that pyproject.toml admits.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest tests/test_environment.py tests/test_golden.py tests/test_published.py \
		tests/test_sampling_leaves_training_unchanged.py tests/training/test_resume.py tests/proof/test_verify.py

# Kills, failing calls of the system, full disks, damaged files, nonsense for input: minutes long.
# Needs a C compiler for the failing calls, and root for the full disk; SEED=1 draws another one.
test-faults: .venv/installed-dev
	$(BIN)/python -m tests.faults $(if $(SEED),--seed $(SEED)) $(PARTS)

# Which small bugs does no test see? Minutes a file, so FILES="minigen/exact/*.py" names some, and
# SAMPLE=50 tries so many of each, for LIMIT=900 seconds at most. Writes tests/mutants/RESULTS.md.
mutants: .venv/installed-mutants
	nice -n 10 $(BIN)/python -m tests.mutants $(foreach file,$(FILES),'$(file)') \
		$(if $(SAMPLE),--sample $(SAMPLE)) $(if $(STRICT),--strict) $(if $(SEED),--seed $(SEED)) \
		$(if $(LIMIT),--limit $(LIMIT)) $(if $(JOBS),--jobs $(JOBS)) \
		$(if $(AGAIN),--again) $(if $(QUICK),--quick) $(if $(NAMED),--named)

# The report in a real browser: Debian's chromium, which no pip can bring.
test-browser: .venv/installed-browser
	$(BIN)/python -m pytest tests/report/in_chromium.py

screenshot: .venv/installed-browser
	$(BIN)/python docs/screenshot.py

# The default config, and every command's output in README.md and docs/, written again.
docs: .venv/installed-dev
	$(BIN)/minigen config > configs/fables.toml
	$(BIN)/python -m tests.test_documents
	$(BIN)/python -m docs.notebook
	$(BIN)/python -m docs.api

# What a change must pass beside the tests; the hook in .pre-commit-config.yaml runs it.
check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest tests/test_architecture.py

# TEXT=file measures on another text than the embedded one.
bench: .venv-bench/installed
	.venv-bench/bin/python -m benchmarks $(if $(TEXT),--text $(TEXT))

# The fingerprints in every environment that can be built here; writes docs/environments.md. Some of
# the groups alone: GROUPS="kernels workers".
matrix: .venv/installed-dev
	$(BIN)/python -m tests.matrix $(GROUPS)

clean:
	rm -rf .venv .venv-* runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# pip works on the new environment from outside, so that no python3-venv package is needed, and
# puts a pip in it for those who activate it.
.venv/installed: pyproject.toml
	@echo "Installing minigen and what it needs (numpy, scipy, numba, …) into .venv, once: about a minute"
	$(PYTHON) -m venv --without-pip .venv
	$(INSTALL) pip -e '.[fast]'
	touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing what the tests and checks need (pytest, mypy, ruff, altair, …) into .venv, once"
	$(INSTALL) -e '.[dev]'
	touch $@

.venv/installed-mutants: .venv/installed-dev
	@echo "Installing what finds the tests of a line (pytest-cov) into .venv, once"
	$(INSTALL) 'pytest-cov>=6'
	touch $@

.venv/installed-browser: .venv/installed-dev
	@command -v chromium >/dev/null || { echo "chromium is missing: apt-get install chromium" >&2; exit 1; }
	@echo "Installing what drives chromium (playwright, axe) into .venv, once"
	$(INSTALL) 'playwright>=1.50' 'axe-playwright-python>=0.1'
	touch $@

# The benchmarks' peers are large: they stay out of the other environment.
.venv-bench/installed: pyproject.toml benchmarks/requirements.txt
	@echo "Installing minigen and its peers (PyTorch, JAX, …) into .venv-bench, once: some minutes"
	$(PYTHON) -m venv --without-pip .venv-bench
	$(subst $(BIN),.venv-bench/bin,$(INSTALL)) -e '.[fast,mpi]' -r benchmarks/requirements.txt
	touch $@

OLDEST = import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(d.replace(">=", "==") for d in p["dependencies"] + p["optional-dependencies"]["fast"]))

.venv-oldest/installed: pyproject.toml
	@echo "Installing minigen and the oldest of all that it needs into .venv-oldest, once"
	$(PYTHON) -m venv --without-pip .venv-oldest
	$(PYTHON) -m pip --python .venv-oldest/bin/python install --quiet --disable-pip-version-check \
		-e . $$($(PYTHON) -c '$(OLDEST)') pytest hypothesis
	touch $@
