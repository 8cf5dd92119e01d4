# SPDX-License-Identifier: Apache-2.0
#
#   make setup      install what is missing, into the system (apt) and .venv (pip)
#   make setup-spark  what `nicps dbn` on a Spark cluster needs too: pyspark and a Java runtime
#   make demo       four hosts train MNIST, or the digits where MNIST is not found
#   make demo-dbn   ten workers train a deep belief network on MNIST for a few epochs (needs DATA=PATH)
#   make test       the tests;  make test-failed  those that failed, alone;  make test-long  those that take minutes
#   make test-faults  the rows of docs/faults.md in each exchange, file by file (an hour;  EXCHANGES=switch  in one)
#   make p4         compile p4/nicps.json anew (needs p4c-bm2-ss)
#   make lint       what CI checks beside the tests
#   make clean      remove what was built;  make distclean  .venv and runs/ too
#
# DATA=PATH names the folder that holds the data sets, HOSTS=N the number of the demo's hosts, ARGS=...
# more arguments for the command, WORKERS=N the test processes (four keep two processors
# busy), TORCH_INDEX=URL the package index that has PyTorch's CPU builds.

# The demo's result must be the last line on stdout, so make may not print "Leaving directory" after it
# when it is called with -C. GNU make 4.4 and newer obey --no-print-directory here. Older ones only keep
# quiet when they collect the output of parallel jobs, and leave alone the lines that begin with a +.
MAKEFLAGS += --no-print-directory -Oline -j2
.NOTPARALLEL:
.SILENT:
LIVE := $(if $(findstring n,$(firstword -$(MAKEFLAGS))),,+)
RUN := $(LIVE)env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL

PYTHON := .venv/bin/python
# The tests start a thousand processes: without bytecode files each of them compiles all of nicps anew.
TEST := $(RUN) -u PYTHONDONTWRITEBYTECODE $(PYTHON) -m pytest
HOSTS ?= 4
ARGS ?=
WORKERS ?= 4
EXCHANGES ?= broadcast stripes switch
# Tests of docs/faults.md that name no exchange. Those of test_faults_stripes.py, _switch.py and _servers.py do.
FAULTS := $(filter-out %_stripes.py %_switch.py %_servers.py,$(wildcard tests/netns/test_faults_*.py)) \
	$(patsubst %,tests/netns/test_%.py,admission cancel crashes saved)
ifdef DATA
export NICPS_DATA := $(DATA)
endif
export TORCH_INDEX TORCH_VERSION

.PHONY: setup setup-spark demo demo-dbn test test-failed test-long test-faults p4 lint format clean distclean

setup:
	$(RUN) .ci/setup

setup-spark: setup
	$(RUN) .ci/setup-spark

demo: setup
	$(LIVE)job=trainer/jobs/digits; \
	if [ -n "$$NICPS_DATA" ]; then \
		if ! [ -d "$$NICPS_DATA" ]; then \
			echo "make demo: error: $$NICPS_DATA is no folder: DATA or NICPS_DATA names the one with MNIST" >&2; \
			exit 2; \
		elif ls "$$NICPS_DATA"/train-images-idx3-ubyte* "$$NICPS_DATA"/mnist/train-images-idx3-ubyte* \
			2>/dev/null | grep -q .; then \
			job=trainer/jobs/mnist; \
		else \
			echo "make demo: neither $$NICPS_DATA nor its mnist/ has MNIST: the hosts train the digits" >&2; \
		fi; \
	fi; \
	exec env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL \
		$(PYTHON) -m nicps lab run $$job --hosts $(HOSTS) --json $(ARGS)

demo-dbn: setup
	if [ -z "$$NICPS_DATA" ]; then \
		echo "make demo-dbn: error: DATA=PATH must name the folder that holds MNIST, or its mnist/" >&2; \
		exit 2; \
	fi
	$(RUN) $(PYTHON) -m nicps dbn --workers 10 --epochs 3 --finetune 12 --json $(ARGS)

test: setup
	$(TEST) -n $(WORKERS) --no-loadscope-reorder $(ARGS)

test-failed: setup
	$(TEST) --last-failed --last-failed-no-failures none -rA $(ARGS)

test-long: setup
	$(TEST) -m long $(ARGS)

test-faults: setup
	$(LIVE)failed=; \
	for exchange in $(EXCHANGES); do \
		for file in $(FAULTS); do \
			env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL -u PYTHONDONTWRITEBYTECODE \
				$(PYTHON) -m pytest -m "long or not long" --exchange $$exchange $(ARGS) $$file || \
				failed="$$failed $$exchange:$$file"; \
		done; \
	done; \
	if [ -n "$$failed" ]; then echo "make test-faults: error: failed:$$failed" >&2; exit 1; fi

p4:
	$(RUN) p4c-bm2-ss --std p4-16 --Wdisable=unused -o p4/nicps.json p4/nicps.p4

lint: setup
	$(RUN) $(PYTHON) .ci/check_tree.py
	$(RUN) $(PYTHON) -m ruff check
	$(RUN) $(PYTHON) -m ruff format --check
	$(RUN) $(PYTHON) -m mypy
	$(RUN) $(PYTHON) -m mypy vm-lab
	$(RUN) $(PYTHON) -m nicps.wiregen --check
	$(RUN) find ebpf -name '*.[ch]' -exec clang-format --dry-run -Werror {} +

format: setup
	$(RUN) $(PYTHON) -m ruff check --fix
	$(RUN) $(PYTHON) -m ruff format
	$(RUN) find ebpf -name '*.[ch]' -exec clang-format -i {} +

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv runs
