# `make demo`, `make test`, `make docs` and `make dist` need Python >= 3.11, a C compiler and the package index; each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Many tests wait for processes that they have started: one worker more than cores keeps all cores busy.
PYTEST = PYTEST_XDIST_AUTO_NUM_WORKERS=$$(($$(getconf _NPROCESSORS_ONLN) + 1)) $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal
export HF_HUB_OFFLINE = 1
export NO_MKDOCS_2_WARNING = 1
unexport PYTHONDONTWRITEBYTECODE  # set, it would have each of hundreds of processes compile all that it imports, torch as well

.PHONY: demo papers test test-rest test-all types test-vllm vllm-versions docs dist install clean

demo: install
	$(BIN)/aurora demo -o demo

# The headline figures of the three papers, in papers/.
papers: install
	for paper in aurora lazarus bcc; do $(BIN)/python -m bench.papers.$$paper -o papers || exit 1; done

# What shows that an installation works, in under eight minutes on two cores: one of each kind.
test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types
	$(PYTEST) -m "not full"

# What `make test` leaves out: more of each kind, longer runs, every page's commands.
test-rest: install
	$(PYTEST) -m full

test-all: test test-rest

# Types, and which package imports which.
types: install
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in site/. A link or heading that is missing is an error.
docs: install
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict --quiet

# Wheel and source distribution, in dist/.
dist: install
	rm -rf dist
	$(BIN)/python -m build --quiet

# A CPU build of vLLM in an environment of its own (3.5 GB). TESTS='tests/integrations/test_vllm.py tests/integrations/test_vllm_runners.py tests/integrations/test_vllm_command.py tests/integrations/test_vllm_survive.py tests/integrations/test_vllm_requests.py' are those that need vLLM, and SELECT='-m "not slow"' those of them that CI runs.
TESTS ?= tests/integrations
SELECT ?=
test-vllm: $(VENV)-vllm/installed
	$(VENV)-vllm/bin/pytest $(TESTS) $(SELECT)

# Which published versions of vLLM have what the plugin relies on: the table in docs/reference/vllm-limits.md, from their source distributions (45 MB each), which are imported with the installed vLLM's dependencies.
vllm-versions: $(VENV)-vllm/installed
	$(VENV)-vllm/bin/python -m tests.integrations.vllm_versions

$(VENV)-vllm/installed: pyproject.toml tests/integrations/install.sh
	sh tests/integrations/install.sh $(PYTHON) $(VENV)-vllm
	touch $@

install: $(VENV)/installed
	$(BIN)/python hatch_build.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"aurora needs Python 3.11 or newer, found {sys.version.split()[0]}")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm demo papers site dist
