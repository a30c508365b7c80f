## make demo    train the example, record three windows, list the files and how to open them
## make test    run the test suite: four to five minutes on two CPUs
## make lint    ruff, mypy, the changelog, and the warnings of the C compiler
## make docs    build the documentation into site/; a broken link is an error
## make check   lint, docs and test; with -j they run at the same time, as in CI
## make more    list the other targets: benchmarks, releases, and tests that take long
## make clean   remove .venv and caches, but no captures
##
## Each target creates the virtual environment that it needs; a second run installs nothing.
## PYTHON=python3.12 chooses the Python (3.11 or newer), VENV=/elsewhere the environment's folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# constraints.txt chooses the version of torch. On Linux, torch from PyPI comes with CUDA,
# several GB. pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf) are respected. They
# can name an index with CPU builds.
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# tests/conftest.py says how many processes that is. One process runs all tests of a file, because
# these tests share fixtures; files start in the order that tests/conftest.py gives them.
PYTEST := $(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder
# --clean empties Zensical's cache: Zensical does not warn again about a page in its cache.
ZENSICAL := $(BIN)/zensical build --strict --clean
INSTALL := $(PIP) install -c constraints.txt

# After a change of these files, the package is installed again, which compiles the trace reader.
BUILT_FROM := pyproject.toml hatch_build.py instrument/read/trace/_scanner.c \
	instrument/read/facts/_loops.c

# The time is part of the name, so that no demo overwrites the files of another.
DEMO := outputs/demo-$(shell date +%Y-%m-%d-%H-%M-%S)

.PHONY: help demo test lint docs check more clean

help:
	@sed -n 's/^## \{0,1\}//p' Makefile

more:
	@sed -n 's/^## \{0,1\}//p' tools/more.mk

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

docs: $(VENV)/.installed-dev
	@if [ -x $(BIN)/zensical ]; then $(ZENSICAL) && $(BIN)/python docs/twins.py site && echo "The documentation is in site/: open site/index.html. Its search needs a server: $(PYTHON) -m http.server -d site"; \
	    else echo "The documentation is not built, because Zensical cannot be installed here."; fi

check: lint docs test

clean:
	rm -rf .venv .venv-newest build dist site .cache .mypy_cache .pytest_cache .ruff_cache
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

include tools/more.mk
