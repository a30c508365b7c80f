## make demo    train the example, record three windows, say what they wrote and how to open it
## make test    run the whole test suite
## make check   ruff, mypy, the documentation and the test suite
## make docs    build the documentation into site/; a link that leads nowhere is an error
## make bench   measure against the peers in tests/benchmarks: ten minutes, 6 GB of memory, 3 GB of disk
## make older   run the tests of trainers against an older minor version of each
## make compat  run the core suite under each Python from 3.10 to 3.13 at hand, and under older torch: an hour, 5 GB at a time
## make soak    record ten thousand windows and look for what is left of them: some minutes
## make mutants  try 300 random edits of the core modules against their tests: an hour or more; ONLY, COUNT and SEED choose
## make mutants-planted  make named edits, each of which one test must notice: five minutes
## make wheel   build the sdist and the wheel into dist/, and run the first pages with the wheel from an empty folder
## make clean   remove .venv and caches; what runs wrote stays
##
## Each makes the virtual environment it needs; a second run installs nothing.
## PYTHON=python3.12 chooses the Python (3.10 or newer), VENV=/elsewhere the place of the environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# constraints.txt alone says which torch. On Linux the one from PyPI brings CUDA along, several GB; pip's own settings
# (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf) are respected, and may name an index with CPU builds.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# Four processes at most: each loads torch. Tests of one file share what they make.
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile
# Anew each time: warnings about a page that its cache holds would be left out.
ZENSICAL := $(BIN)/zensical build --strict --clean
INSTALL := $(PIP) install -c constraints.txt
INSTALL_OLDER := $(subst $(VENV),$(VENV)-older,$(INSTALL)) -c constraints-older.txt

# Named by the second, so that no demo overwrites another's files.
DEMO := outputs/demo-$(shell date +%Y-%m-%d-%H-%M-%S)

.PHONY: help demo test check docs bench older compat soak wheel mutants mutants-planted clean

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/train_lm.py hydra.run.dir=$(DEMO) \
	    profiler.wait=30 profiler.repeat=3 'profiler/sinks=[table,stacks,tensorboard]' profiler.with_stack=true
	@echo
	@echo "The three windows wrote:"
	@echo
	@find $(DEMO)/profile -type f | sort
	@echo
	@echo "trace.json.gz  the timeline: drop it on https://ui.perfetto.dev"
	@echo "table.txt      the tables above; from any capture or trace: $(BIN)/instrument show PATH, for example"
	@echo "               $(BIN)/instrument show $$(ls -d $(DEMO)/profile/steps_* | tail -n 1)"
	@echo "stacks.txt     a flame graph: drop it on https://www.speedscope.app, or flamegraph.pl stacks.txt > flame.svg"
	@echo "capture.json   what was recorded, when, where, with which versions and options"
	@echo "tensorboard/   curves over the windows: $(BIN)/tensorboard --logdir $(DEMO)/profile/tensorboard"

test: $(VENV)/.installed-dev
	$(PYTEST)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if [ -x $(BIN)/zensical ]; then $(ZENSICAL); else echo "The documentation is not built: Zensical needs Python 3.11."; fi
	$(PYTEST)

docs: $(VENV)/.installed-dev
	$(ZENSICAL)
	@echo "The documentation is in site/: open site/index.html."

# Each file that can be run prints its table; all are run, and the target fails where one missed a ratio.
bench: $(VENV)/.installed-bench
	@failed=0; for file in $$(grep -l __main__ tests/benchmarks/*.py); do $(BIN)/python $$file || failed=1; done; exit $$failed

older: $(VENV)-older/.installed
	$(VENV)-older/bin/python -m pytest tests/integrations

# Not run by CI. ONLY="3.10/2.13.0" chooses, TMPDIR says where the environments are made.
compat:
	$(PYTHON) tests/compat.py $(ONLY)

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m soak -s tests/soak

# TAG=v0.1.0 also checks that the tag, pyproject.toml and CHANGELOG.md name the same version.
wheel: $(VENV)/.installed-dev
	$(BIN)/python tests/release.py $(TAG)

# Not run by CI. ONLY="links/launches analysis/steps" names modules by parts of their paths.
mutants: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python -u tests/mutants.py --count $(or $(COUNT),300) --seed $(or $(SEED),0) $(if $(ONLY),--only $(ONLY))

mutants-planted: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python -u tests/mutants.py --planted

clean:
	rm -rf .venv .venv-older build dist site .cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# pip is the last that venv makes: where it is missing, the environment is not whole.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing torch and the package into $(VENV); this takes a minute or more."
	@$(INSTALL) torch
	@$(INSTALL) -e '.[tensorboard]'
	@touch $@

# Holds what the demo needs as well.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing torch, the package and what its tests need into $(VENV); this takes a minute or more."
	@$(INSTALL) torch
	@$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(VENV)/.installed-dev
	@echo "Installing what the benchmarks compare with into $(VENV)."
	@$(INSTALL) -e '.[bench]'
	@touch $@

$(VENV)-older/.installed: pyproject.toml constraints.txt constraints-older.txt
	$(PYTHON) -m venv $(VENV)-older
	@echo "Installing older trainers into $(VENV)-older; this takes a minute or more."
	@$(INSTALL_OLDER) torch
	@$(INSTALL_OLDER) -e '.[dev]'
	@touch $@
