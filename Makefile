## make demo    train the example, record three windows, list the files and how to open them
## make test    run the test suite: four to five minutes on two CPUs
## make lint    ruff, mypy, and the warnings of the C compiler
## make check   lint, docs and test; with -j they run at the same time, as in CI
## make nightly  all tests, also slow ones and with many random examples, planted mutants, and fuzzing
##              with sanitizers, which needs clang; all with the newest packages: an hour or more
## make lock    choose the newest version of each package of the tests, for constraints.txt
## make docs    build the documentation into site/; a broken link is an error
## make bench   compare costs with those of other tools: ten minutes, 6 GB of memory, 3 GB of disk
## make older   run the tests of trainers with an older minor version of each trainer
## make compat  run the core tests with each installed Python from 3.11 to 3.14 and with other torch
##              versions: an hour, up to 5 GB of disk
## make soak    record ten thousand windows and look for leaks, read a dataset with Spark (needs
##              Java): some minutes
## make mutants  make 300 random edits in the core modules and list those that no test notices: an
##              hour or more; ONLY, COUNT and SEED choose the edits
## make mutants-planted  make named edits, each of which one test must notice: five minutes
## make fuzz    fuzz the code in C under ASan and UBSan, and all commands with mutated traces and
##              captures: half an hour, or SECONDS=60; needs clang; INSTRUMENT_TRACES=FOLDER names real
##              traces, which are better seeds
## make wheel   build the sdist and two wheels into dist/, one with the compiled trace reader, and run
##              the first pages of the documentation with this wheel in an empty folder
## make clean   remove .venv and caches, but no captures
##
## Each target creates the virtual environment that it needs; a second run installs nothing.
## PYTHON=python3.12 chooses the Python (3.11 or newer), VENV=/elsewhere the environment's folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Only constraints.txt chooses the version of torch. On Linux, torch from PyPI comes with CUDA,
# several GB. pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf) are respected. They
# can name an index with CPU builds.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# tests/conftest.py says how many processes that is. One process runs all tests of a file, because
# these tests share fixtures; files start in the order that tests/conftest.py gives them.
PYTEST := $(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder
# --clean empties Zensical's cache: Zensical does not warn again about a page in its cache.
ZENSICAL := $(BIN)/zensical build --strict --clean
INSTALL := $(PIP) install -c constraints.txt
# Of all pins, environments of other versions keep that of torch.
TORCH := $(shell grep '^torch==' constraints.txt)
INSTALL_OPEN = $(@D)/bin/python -m pip --quiet --disable-pip-version-check --no-input install $(TORCH)

# After a change of these files, the package is installed again, which compiles the trace reader.
BUILT_FROM := pyproject.toml hatch_build.py instrument/read/trace/_scanner.c \
	instrument/read/facts/_loops.c

# The time is part of the name, so that no demo overwrites the files of another.
DEMO := outputs/demo-$(shell date +%Y-%m-%d-%H-%M-%S)

.PHONY: help demo test lint check docs nightly lock bench older compat soak fuzz wheel mutants mutants-planted clean FORCE \
	nightly-parts nightly-tests

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

# OVERRIDES are further ones of the example's config.
demo: $(VENV)/.installed-demo
	$(BIN)/python examples/train_lm.py hydra.run.dir=$(DEMO) \
	    profiler.wait=30 profiler.repeat=3 'profiler/sinks=[table,stacks,tensorboard]' profiler.with_stack=true $(OVERRIDES)
	@echo
	@echo "The three windows wrote:"
	@echo
	@find $(DEMO)/profile -type f | sort
	@echo
	@echo "trace.json.gz  the timeline: drop it on https://ui.perfetto.dev"
	@echo "table.txt      the whole tables; to print those of any capture or trace:"
	@echo "               $(BIN)/instrument show $$(ls -d $(DEMO)/profile/steps_* | tail -n 1)"
	@echo "stacks.txt     a flame graph: drop it on https://www.speedscope.app"
	@echo "capture.json   what was recorded, when, where, with which versions and options"
	@echo "tensorboard/   curves over the windows:"
	@echo "               $(BIN)/tensorboard --logdir $(DEMO)/profile/tensorboard"
	@echo
	@echo "The report page of the three windows, to open in a browser:"
	@$(BIN)/instrument report $(DEMO)/profile -o $(DEMO)/report.html

test: $(VENV)/.installed-dev
	$(PYTEST)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/towncrier build --draft --version next > /dev/null
	@if command -v $(CC) > /dev/null; then include=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
	    for words in $(foreach file,$(filter %.c,$(BUILT_FROM)),"-isystem $$include $(file)") $(foreach file,$(wildcard tools/fuzz/*.c),"-Itools/fuzz $(file)"); do \
	    command="$(CC) -std=c99 -O3 -Wall -Wextra -Werror -c -o /dev/null $$words"; \
	    echo "$$command"; $$command || exit 1; done; \
	    else echo "The code in C is not compiled, because there is no C compiler."; fi

check: lint docs test

docs: $(VENV)/.installed-dev
	@if [ -x $(BIN)/zensical ]; then $(ZENSICAL) && echo "The documentation is in site/: open site/index.html. Its search needs a server: $(PYTHON) -m http.server -d site"; \
	    else echo "The documentation is not built, because Zensical cannot be installed here."; fi

# A part that fails does not keep the others from running. The time that a test may take is for those of `make test`.
nightly: $(VENV)-newest/.installed
	$(MAKE) VENV=$(VENV)-newest nightly-parts -k

nightly-parts: nightly-tests mutants-planted fuzz

nightly-tests:
	$(PYTEST) -m 'not soak' --hypothesis-profile nightly -o faulthandler_timeout=3600

# Runs every benchmark file but try.py, which takes hours; the target fails if a ratio is above its limit.
bench: $(VENV)/.installed-bench
	@failed=0; for file in $$(grep -l __main__ $(filter-out benchmarks/try.py,$(wildcard benchmarks/*.py))); do $(BIN)/python $$file || failed=1; done; exit $$failed

older: $(VENV)-older/.installed
	$(VENV)-older/bin/python -m pytest tests/integrations

# Not run by CI. ONLY="3.12/2.13.0" selects versions; the environments are created in TMPDIR.
compat:
	$(PYTHON) tools/compat.py $(ONLY)

soak: $(VENV)/.installed-soak
	$(BIN)/python -m pytest -m soak -s -o faulthandler_timeout=3600 tests/soak tests/sinks

# Not run by CI: there, the test suite compares the code in C with Python on random input. Each of
# _loops.c, _scanner.c and the commands gets a third of the seconds.
fuzz: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python tools/fuzz/run.py $(or $(SECONDS),1800)

# TAG=v0.1.0 also checks that the tag, instrument/__init__.py and CHANGELOG.md name the same version.
wheel: $(VENV)/.installed-dev
	$(BIN)/python tools/release.py $(TAG)

# Not run by CI. ONLY="facts/launches views/steps" selects modules by parts of their paths.
mutants: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python -u tools/mutants.py --count $(or $(COUNT),300) --seed $(or $(SEED),0) $(if $(ONLY),--only $(ONLY))

mutants-planted: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python -u tools/mutants.py --planted

# A new environment, whose packages become the constraints. Comments and torch stay as they are.
lock:
	$(PYTHON) tools/lock.py

clean:
	rm -rf .venv .venv-older .venv-newest build dist site .cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# venv installs pip last: if pip is missing, the environment is incomplete.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: $(BUILT_FROM) constraints.txt | $(BIN)/pip
	@echo "Installing torch and the package into $(VENV); this takes a minute or more."
	@$(INSTALL) torch
	@$(INSTALL) -e '.[tensorboard]'
	@touch $@

# This environment can also run the demo.
$(VENV)/.installed-dev: $(BUILT_FROM) constraints.txt | $(BIN)/pip
	@echo "Installing torch, the package and what its tests need into $(VENV); this takes a minute or more."
	@$(INSTALL) torch
	@$(INSTALL) -e '.[dev,docs]' || { echo "Not all of it can be installed; trying without Zensical, which builds the documentation."; \
	    $(INSTALL) -e '.[dev]'; }
	@touch $(VENV)/.installed-demo $@

$(VENV)/.installed-bench: $(BUILT_FROM) constraints.txt | $(VENV)/.installed-dev
	@echo "Installing what the benchmarks compare with into $(VENV)."
	@$(INSTALL) -e '.[bench]'
	@touch $@

$(VENV)/.installed-soak: $(BUILT_FROM) constraints.txt | $(VENV)/.installed-dev
	@echo "Installing Spark into $(VENV)."
	@$(INSTALL) -e '.[soak]'
	@touch $@

$(VENV)-older/.installed: $(BUILT_FROM) constraints.txt constraints-older.txt
	$(PYTHON) -m venv $(@D)
	@echo "Installing older trainers into $(@D); this takes a minute or more."
	@$(INSTALL_OPEN)
	@$(INSTALL_OPEN) -c constraints-older.txt -e '.[dev]'
	@touch $@

# Made anew each time: pip does not update what is installed.
$(VENV)-newest/.installed: FORCE
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	@echo "Installing the newest packages into $(@D); this takes some minutes."
	@$(INSTALL_OPEN)
	@$(INSTALL_OPEN) -e '.[dev]'
	@touch $(@D)/.installed-dev $(@D)/.installed-demo $@
