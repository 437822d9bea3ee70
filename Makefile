# Everything is set up on first use: Python 3.11 or later, make and git suffice.
# `make PY=python3.12 test` chooses the Python; changing it rebuilds .venv.
MAKEFLAGS += --no-print-directory
.NOTPARALLEL: # the steps of `make test` have an order
.DEFAULT_GOAL := help

# The first Python that really runs: a pyenv shim may exist and still fail.
PY ?= python3.12 python3.13 python3.11 python3 python
PROBE := import ensurepip, sys; v = sys.version_info; v < (3, 11) and sys.exit(1); \
         print(sys._base_executable, "%d.%d" % v[:2])
FOUND := $(shell for p in $(PY); do $$p -c '$(PROBE)' 2>/dev/null && break; done)
PYTHON := $(firstword $(FOUND))
READY := .venv/ready-$(lastword $(FOUND))

UV_VERSION := 0.13.9
TORCH := torch==2.13.0+cpu
SITE := _site/_build/html
NOTEBOOKS = $(wildcard nbs/*.ipynb)

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv
export PYDEVD_DISABLE_FILE_VALIDATION := 1

# From nothing each time: Sphinx repeats no warning about a page it has built before.
BUILD = rm -rf _site && jupyter-book build -q . --config book/_config.yml --toc _toc.yml \
        --path-output _site -W --keep-going -n >/dev/null
NBVAL = pytest -n 2 --dist loadfile --nbval --nbval-current-env \
        --nbval-cell-timeout 120 --nbval-sanitize-with nbval_sanitize.cfg -p no:cacheprovider nbs
PYTEST = pytest -p no:cacheprovider
GRID ?= 1

# $(call step,heading,command): a heading, the command, the time it took.
step = @echo; echo "== $(1)"; t=$$(date +%s); $(2) || exit 1; \
       echo "-- $$(( $$(date +%s) - t )) s"

.PHONY: help book test test-all bench mutants notebooks clean setup sync nbval unit site browser

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Steps of make test, each by itself: make sync nbval unit site browser"

book: setup site ## build the book
	@echo; echo "The book is in $(SITE)/index.html"

test: setup sync nbval unit site browser ## run every check, as CI does

test-all: setup ## run the whole grid against PyTorch, which takes hours; GRID=0.005 is a sample
	$(call step,grid against PyTorch,OMP_NUM_THREADS=1 FLASHLIT_GRID=$(GRID) \
	  $(PYTEST) -vv -rs -n auto --dist worksteal tests/test_torch.py)

bench: setup ## run the benchmarks
	@set -e; for f in $(wildcard tests/bench_*.py); do echo; echo "== $$f"; python $$f; done

mutants: setup ## plant every fault of the museum: the tests must turn red
	$(call step,faults planted in copies of the package,python tests/mutants.py)

notebooks: setup ## run all notebooks in place, clean them, export the package
	nbdev_clean && nbdev_export
	python book/run_notebooks.py $(NOTEBOOKS) && nbdev_clean

clean: ## remove all that make has built, the environments included
	rm -rf .uv .venv _site build dist *.egg-info .pytest_cache .hypothesis
	rm -f flashlit/_modidx.py
	find flashlit tests book -name __pycache__ -prune -exec rm -rf {} +

# The steps of `make test`, in its order.

sync: setup
	$(call step,notebooks clean and package in step,$(PYTEST) tests/test_sync.py)

nbval: setup
	$(call step,notebooks run and give their stored outputs,$(NBVAL))

unit: setup
	$(call step,tests of the package,$(PYTEST) -rs -n 2 --dist worksteal tests \
	  --ignore tests/test_sync.py --ignore tests/test_book.py)

site: setup
	$(call step,book,$(BUILD))

browser: setup
	@bash tests/chromium.sh
	$(call step,book in a browser,$(PYTEST) -rs tests/test_book.py)

# Set-up: uv in an environment of its own installs the locked versions.

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No working Python 3.11+ among: $(PY)"; exit 1; }
	@echo "== set-up with $(PYTHON)"
	@test -x .uv/bin/uv || { "$(PYTHON)" -m venv .uv && .uv/bin/pip install -q uv==$(UV_VERSION); }
	@.uv/bin/uv venv -q --clear -p "$(PYTHON)" .venv
	@.uv/bin/uv pip install -q -p .venv/bin/python -c constraints.txt -e '.[dev,peers]'
	@.uv/bin/pip --python .venv/bin/python install -q -c constraints.txt $(TORCH) 2>/dev/null || \
	  echo "No $(TORCH) for this Python: the tests that compare with PyTorch will be skipped."
	@touch $@
