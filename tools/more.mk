## make bench   compare costs with those of other tools: ten minutes, 6 GB of memory, 3 GB of disk
## make compat  run the core tests with each Python from 3.11 to 3.14 and with other torch versions:
##              an hour; needs uv; ONLY="3.12/2.13.0" chooses
## make fuzz    fuzz the code in C under ASan and UBSan, and all commands with mutated traces and
##              captures: half an hour, or SECONDS=60; needs clang; INSTRUMENT_TRACES=FOLDER names real
##              traces, which are better seeds
## make lock    choose the newest version of each package of the tests, for constraints.txt; needs uv
## make mutants  make 300 random edits in the core modules and list those that no test notices: an
##              hour or more; ONLY, COUNT and SEED choose the edits
## make mutants-planted  make named edits, each of which one test must notice: five minutes
## make nightly  all tests, also slow ones and with many random examples, planted mutants, and fuzzing
##              with sanitizers, which needs clang; all with the newest packages: an hour or more
## make older   run the tests of trainers with an older minor version of each trainer; needs uv
## make soak    record ten thousand windows and look for leaks, read a dataset with Spark (needs
##              Java): some minutes
## make wheel   build the sdist and two wheels into dist/, one with the compiled trace reader, and run
##              the first pages of the documentation with this wheel in an empty folder

.PHONY: bench compat fuzz lock mutants mutants-planted nightly nightly-parts nightly-tests older soak wheel FORCE

# Of all pins, environments of other versions keep that of torch.
TORCH := $(shell grep '^torch==' constraints.txt)
INSTALL_OPEN = $(@D)/bin/python -m pip --quiet --disable-pip-version-check --no-input install $(TORCH)

# A part that fails does not keep the others from running. The time that a test may take is for those of `make test`.
nightly: $(VENV)-newest/.installed
	$(MAKE) VENV=$(VENV)-newest nightly-parts -k

nightly-parts: nightly-tests mutants-planted fuzz

nightly-tests:
	$(PYTEST) -m 'not soak' --hypothesis-profile nightly -o faulthandler_timeout=3600

# Runs every benchmark file but try.py, which takes hours; the target fails if a ratio is above its limit.
bench: $(VENV)/.installed-bench
	@failed=0; for file in $$(grep -l __main__ $(filter-out benchmarks/try.py,$(wildcard benchmarks/*.py))); do $(BIN)/python $$file || failed=1; done; exit $$failed

older:
	uv run --isolated --no-project --python $(PYTHON) --with $(TORCH) --with-requirements constraints-older.txt \
	    --with-editable '.[dev]' pytest tests/integrations

compat:
	$(PYTHON) tools/compat.py $(ONLY)

soak: $(VENV)/.installed-soak
	$(BIN)/python -m pytest -m soak -s -o faulthandler_timeout=3600 tests/soak tests/sinks

# In CI, the test suite compares the code in C with Python on random input. Each of
# _loops.c, _scanner.c and the commands gets a third of the seconds.
fuzz: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python tools/fuzz/run.py $(or $(SECONDS),1800)

# TAG=v0.1.0 also checks that the tag, instrument/__init__.py and CHANGELOG.md name the same version.
wheel: $(VENV)/.installed-dev
	$(BIN)/python tools/release.py $(TAG)

# ONLY="facts/launches views/steps" selects modules by parts of their paths.
mutants: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python -u tools/mutants.py --count $(or $(COUNT),300) --seed $(or $(SEED),0) $(if $(ONLY),--only $(ONLY))

mutants-planted: $(VENV)/.installed-dev
	nice -n 15 $(BIN)/python -u tools/mutants.py --planted

# For all Pythons and platforms. pyproject.toml holds the version of torch.
lock:
	uv pip compile --quiet --upgrade --universal --python-version 3.11 --extra dev --extra docs --no-annotate \
	    --custom-compile-command 'make lock' --output-file constraints.txt pyproject.toml

$(VENV)/.installed-bench $(VENV)/.installed-soak: $(VENV)/.installed-%: $(BUILT_FROM) constraints.txt | $(VENV)/.installed-dev
	@echo "Installing what 'make $*' needs into $(VENV)."
	@$(INSTALL) -e '.[$*]'
	@touch $@

# Made anew each time: pip does not update what is installed.
$(VENV)-newest/.installed: FORCE
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	@echo "Installing the newest packages into $(@D); this takes some minutes."
	@$(INSTALL_OPEN)
	@$(INSTALL_OPEN) -e '.[dev]'
	@touch $(@D)/.installed-dev $(@D)/.installed-demo $@
