PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test browser bench-quick clean

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

bench-quick: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/solver.py --quick
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/budget.py --quick

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
