# Each target works on its own and can be called again: all of them install first, and install does
# nothing when .venv is up to date. PYTHON chooses the interpreter that .venv is made from.
PYTHON ?= python3

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test docs wheel lint format clean

help:
	@echo "make install   make .venv with Postlude and its tools (PYTHON=... chooses the Python)"
	@echo "make demo      show chains and a network block before and after, on this machine"
	@echo "make test      lint, then the six rungs of tests, each with its own total"
	@echo "make docs      build the documents as a site, into build/site"
	@echo "make wheel     build the wheel, into dist"
	@echo "make lint      ruff and mypy, nothing changed"
	@echo "make format    let ruff rewrite what it can"
	@echo "make clean     remove .venv, caches and built files"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" bash tools/make_venv.sh

demo: $(STAMP)
	@mkdir -p build
	@$(VENV)/bin/postlude demo --report build/demo.html

test: lint
	@$(PY) tests/rungs.py

# The site's tools are installed on first use: the tests do without them.
$(VENV)/.docs: $(STAMP)
	@$(PY) -m pip install -qq --no-input --no-warn-conflicts -c $(VENV)/constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "Open build/site/index.html, or with search: $(PY) -m http.server -d build/site"

wheel: $(STAMP)
	@$(PY) -m hatchling build -t wheel -d dist

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
