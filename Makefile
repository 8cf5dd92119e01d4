# SPDX-License-Identifier: Apache-2.0
#
#   make setup      install what is missing, into the system (apt) and .venv (pip)
#   make demo       four hosts train MNIST, or the digits where MNIST is not found
#   make test       the tests;  make test-long  those that take minutes
#   make lint       what CI checks before the tests
#   make clean      remove what was built;  make distclean  .venv and runs/ too
#
# DATA=PATH names the folder that holds the data sets, HOSTS=N the number of the demo's hosts, ARGS=...
# more arguments for the command, TORCH_INDEX=URL the package index that has PyTorch's CPU builds.

# `make -C` would print "Leaving directory" after the demo's result, which is the last line on stdout.
MAKEFLAGS += --no-print-directory
.SILENT:

PYTHON := .venv/bin/python
HOSTS ?= 4
ARGS ?=
ifdef DATA
export NICPS_DATA := $(DATA)
endif
export TORCH_INDEX TORCH_VERSION

.PHONY: setup demo test test-long lint format clean distclean

setup:
	.ci/setup

demo: setup
	job=trainer/jobs/digits; \
	for folder in "$$NICPS_DATA" "$$NICPS_DATA/mnist"; do \
		for name in train-images-idx3-ubyte train-images-idx3-ubyte.gz; do \
			if [ -n "$$NICPS_DATA" ] && [ -e "$$folder/$$name" ]; then job=trainer/jobs/mnist; fi; \
		done; \
	done; \
	exec $(PYTHON) -m nicps lab run $$job --hosts $(HOSTS) --json $(ARGS)

test: setup
	$(PYTHON) -m pytest $(ARGS)

test-long: setup
	$(PYTHON) -m pytest -m long $(ARGS)

lint: setup
	$(PYTHON) .ci/check_tree.py
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy
	$(PYTHON) -m nicps.wiregen --check
	find ebpf -name '*.[ch]' -exec clang-format --dry-run -Werror {} +

format: setup
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format
	find ebpf -name '*.[ch]' -exec clang-format -i {} +

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv runs
