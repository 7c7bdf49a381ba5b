# Everything runs in .venv, which the first command makes. Plain `make` lists what there is.

# The first of these that is Python 3.10 or newer; or name one: make demo PYTHON=python3.12
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
SOURCES := pyproject.toml $(wildcard tools/*.py csrc/include/* csrc/src/*)

.DEFAULT_GOAL := help
.PHONY: help demo test check docs bench bench-pool bench-torch bench-yoco bench-bundle upcycle_ext clean

help:
	@echo "make demo    watch a real model answer a bank's customers, with and without reuse (about 2 minutes)"
	@echo "make test    run the whole test suite"
	@echo "make check   ruff, mypy and the import rule"
	@echo "make docs    write the API reference to site/"
	@echo "make bench   run the benchmark of the lite engine; prints a table and JSON"
	@echo "make bench-pool   run the benchmark of the tiers (needs redis-server); prints a table and JSON"
	@echo "make bench-torch   run the benchmark of the torch engine on the CPU; prints a table and JSON"
	@echo "make bench-yoco   run the benchmark of drafts on both backends (about 15 minutes); prints a table and JSON"
	@echo "make bench-bundle   run the benchmark of bundles (about 5 minutes); prints a table and JSON"
	@echo "make upcycle_ext   compile csrc/: codecs and block copies for the CPU, and for NVIDIA GPUs if there is an nvcc"
	@echo "make clean   remove what these commands made, .venv too (the built llama.cpp stays in the cache)"
	@echo
	@echo "The first of them also makes .venv: about 10 minutes on 2 cores, because llama.cpp is compiled once."
	@echo "Needed: Python 3.10 or newer and a C++ compiler (Debian, Ubuntu: apt-get install make g++ python3-venv)."

demo: .venv/.kite-demo
	@$(BIN)/kite demo

test: .venv/.kite-dev
	@echo "Running the test suite. It loads two small models; the ten slowest tests are listed at the end."
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

check: .venv/.kite-dev
	@echo "ruff: lint"
	@$(BIN)/ruff check
	@echo "mypy: types (half a minute the first time)"
	@$(BIN)/mypy
	@echo "import-linter: each layer imports only from those below it"
	@$(BIN)/lint-imports

docs: .venv/.kite-dev
	@echo "Writing the API reference from the docstrings to site/ ..."
	@$(BIN)/pdoc --docformat google --output-directory site kitelib
	@echo "Open site/index.html"

bench: .venv/.kite-dev
	@$(BIN)/python tests/benchmarks/lite.py $(BENCH_ARGS)

bench-pool: .venv/.kite-dev
	@$(BIN)/python tests/benchmarks/pool.py $(BENCH_ARGS)

bench-torch: .venv/.kite-dev
	@$(BIN)/python tests/benchmarks/torch_cpu.py $(BENCH_ARGS)

bench-yoco: .venv/.kite-dev
	@$(BIN)/python tests/benchmarks/yoco.py $(BENCH_ARGS)

bench-bundle: .venv/.kite-dev
	@$(BIN)/python tests/benchmarks/bundle.py $(BENCH_ARGS)

upcycle_ext:
	@if [ -z "$(PYTHON)" ]; then echo "No Python 3.10 or newer was found. Name one: make upcycle_ext PYTHON=..."; exit 1; fi
	@echo "Compiling csrc/ ..."
	@$(if $(CUDA_HOME),CUDA_HOME="$(CUDA_HOME)") $(PYTHON) tools/build_native.py --upcycle-ext

clean:
	rm -rf .venv site dist build src/kitelib/native/_kite.so src/kitelib/native/_kite_cuda.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: .venv holds everything the extra needs. A changed pyproject.toml or tool brings it up to date.
.venv/.kite-%: $(SOURCES)
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python 3.10 or newer was found. On Debian or Ubuntu: sudo apt-get install python3 python3-venv"; exit 1; fi
	@$(PYTHON) tools/setup_venv.py $*
	@touch $@
