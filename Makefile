PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test test-extras browser bench-quick wheel docs clean

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Tests of optional packages and of the examples, in an environment of their own; then the wheel, in a clean one.
test-extras: .venv-extras/.installed wheel
	OMP_NUM_THREADS=1 .venv-extras/bin/python -m pytest tests/extras
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt "$$(ls dist/*.whl)[images]"
	cd build && OMP_NUM_THREADS=1 wheel/bin/python ../tests/extras/check_wheel.py

# What a release uploads: dist/pliant-*.whl and dist/pliant-*.tar.gz.
wheel: .venv-extras/.installed
	rm -rf dist build/lib build/bdist.*
	.venv-extras/bin/python -m build --outdir dist . > build.log || { cat build.log; exit 1; }
	rm build.log
	.venv-extras/bin/python -m twine check --strict dist/*

# The documents as a site in build/site, from the same Markdown; a link that leads nowhere is an error.
docs: .venv-docs/.installed
	rm -rf build/docs build/site && mkdir -p build/docs
	tar cf - README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs examples | tar xf - -C build/docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off mkdocs-material
	touch $@

.venv-extras/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-extras
	.venv-extras/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev,energy,openvino,ort,zoo,hf,lightning,flower,executorch,onnx,datasets,examples]' build twine
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
	rm -rf .venv .venv-extras .venv-docs .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
