PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test test-extras browser bench-quick clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/pliant demo

# The report's page is tested in a real browser. Where none can be had, those tests are skipped and say so.
browser: $(STAMP)
	@test -n "$$CHROMIUM" || command -v chromium || command -v chromium-browser || command -v google-chrome || { \
		test "$$(id -u)" = 0 && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; \
	} || echo "No Chromium here, so the page is not tested. Install one (apt install chromium) or set CHROMIUM=/path/to/it."

# One thread per test process: two processes that each take every core only slow each other down.
test: $(STAMP) browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy pliant
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Tests of optional packages, in an environment of their own.
test-extras: .venv-extras/.installed
	OMP_NUM_THREADS=1 .venv-extras/bin/python -m pytest tests/extras

.venv-extras/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-extras
	.venv-extras/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev,energy,ort,zoo,hf,lightning,flower,onnx,datasets]'
	touch $@

# Small versions of the main tables, in build/bench. That of transfer.py needs the folder with data and weights in PLIANT_DATA.
bench-quick: $(STAMP)
	rm -rf build/bench
	@for name in $${PLIANT_DATA:+transfer} digits end_to_end budget solver; do \
		echo "== $$name"; \
		OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py --quick --out build/bench/$$name.json || exit 1; \
	done
	@test -n "$$PLIANT_DATA" || echo "Left out: transfer, which needs data and weights (PLIANT_DATA=DIR make bench-quick)."

clean:
	rm -rf .venv .venv-extras .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
