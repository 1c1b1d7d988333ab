# make bench: set up .venv, measure what this machine can run, write the verdict, a record and an HTML report
# make test:  set up .venv, run the tests that need no GPU (tiers cpu and compile)
# make docs:  build the site of docs/ into out/docs, to be read from disk
# make test-triton VERSION=3.6.0:  the same tests with another Triton
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Further words for the command, e.g. make bench ARGS="--preset squares --quick"
ARGS   ?=

# A Triton other than the one in constraints.txt, for make test-triton
VERSION ?= 3.6.0
TRITON  := $(VENV)/triton-$(VERSION)

# Modules are compiled once, also where the environment says otherwise: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: bench test test-cpu test-triton test-gpu lint docs report clean

bench: $(VENV)/.ready
	$(BIN)/expertile bench $(ARGS)

# Side by side: mypy has one thread.
test: $(VENV)/.ready
	@$(MAKE) --no-print-directory --jobs=2 lint test-cpu

test-cpu: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal -m "not gpu" $(ARGS)

test-triton: $(TRITON)
	PYTHONPATH=$(CURDIR)/$(TRITON) $(MAKE) --no-print-directory test-cpu

test-gpu: $(VENV)/.ready
	$(BIN)/python -m pytest -m "gpu and not slow" $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests tools examples
	$(BIN)/ruff format --check --quiet src tests tools examples
	$(BIN)/mypy

# Strict: a broken link, anchor or docstring ends it. What it needs is installed for it alone, beside the torch there is.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "$(CURDIR)/out/docs/index.html"

report: $(VENV)/.ready
	$(BIN)/python -m tools.pages

$(VENV)/triton-%: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

clean:
	rm -rf $(VENV) out build *.egg-info src/*.egg-info

$(VENV)/.docs: $(VENV)/.ready
	grep -vE '^(torch|triton)==' constraints.txt >$(VENV)/docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/docs.txt -e '.[docs]'
	touch $@

$(VENV)/.ready: pyproject.toml constraints.txt tools/setup_venv.sh
	bash tools/setup_venv.sh "$(PYTHON)" $(VENV)
	touch $@
