# Two commands on a fresh clone: `make demo` and `make test`. Everything lives in .venv; nothing else is touched.
# `make demo CUDA=1` builds the CUDA kernels too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo-out
SECONDS ?= 600
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo quick test test-all test-light test-browser test-ray test-cuda lint bench soak sanitize portability mutants coverage wheels clean

# 1 builds the CUDA kernels too, which takes nvcc and some minutes more.
CUDA ?= $(or $(APCBATCH_CUDA),0)
export APCBATCH_CUDA := $(CUDA)
BUILT := $(VENV)/.installed$(if $(filter 1,$(CUDA)),-cuda)
TESTED := $(VENV)/.tested

# What the package itself needs, or an extra of it, by what was installed.
NEEDED := import importlib.metadata as m; print(*(r for r in m.requires("apcbatch") if ";" not in r))
EXTRA = import importlib.metadata as m; print(*(r.split(";")[0] for r in m.requires("apcbatch") if "$(1)" in r))

$(BUILT): pyproject.toml setup.py constraints.txt $(wildcard csrc/* csrc/cuda/*)
	@echo "Setting up $(VENV), once: 3 steps, about 5 minutes, 2 GB of disk (7 GB where the"
	@echo "package index gives a torch with CUDA's libraries). make clean takes it away."
	@echo "1 of 3: an environment of its own ($(PYTHON) -m venv)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2 of 3: the kernels, compiled for the CPU$(if $(filter 1,$(CUDA)), and for CUDA): 1 to 3 minutes$(if $(filter 1,$(CUDA)), each)"
	@rm -f apcbatch/_CUDA*.so $(VENV)/.installed-cuda
	@$(BIN)/pip install --quiet --no-deps --editable .
	@echo "3 of 3: torch, transformers and what they need, as constraints.txt pins them"
	@$(BIN)/pip install --quiet `$(BIN)/python -c '$(NEEDED)'`
	@touch $@ $(VENV)/.installed

$(TESTED): $(BUILT)
	@echo "What the tests need besides, once: pytest, ray and others, 0.5 GB of disk"
	@$(BIN)/pip install --quiet `$(BIN)/python -c '$(call EXTRA,test)'`
	@touch $@

# What suits a model as small as this: few snapshots, and many requests side by side. float32 has the same bits on every
# processor, so that the figures of README.md are those of every machine.
KEEP_ALL := --policy all --block-size 128 --max-running 64 --max-tokens 128 --dtype float32
demo: $(BUILT)
	@rm -rf $(DEMO)
	@mkdir $(DEMO)
	@echo "1 of 3: 64 conversations, an empty store: shared prefixes are computed once"
	$(BIN)/apcbatch run examples/agents.jsonl -o $(DEMO)/cold.jsonl --store $(DEMO)/store $(KEEP_ALL) -q
	@echo "2 of 3: the same again: nearly all prompt tokens are restored from the store"
	$(BIN)/apcbatch run examples/agents.jsonl -o $(DEMO)/warm.jsonl --store $(DEMO)/store $(KEEP_ALL)
	@echo "3 of 3: a page for the browser of both runs"
	$(BIN)/apcbatch report $(DEMO)/cold.jsonl $(DEMO)/warm.jsonl -o $(DEMO)/report.html \
	  --prompts examples/agents.jsonl

# A process for each core, at most 8; a test's threads wait for one another briefly, so that they share cores well.
PYTEST := $(BIN)/python -m pytest -q -n logical --maxprocesses 8 --dist worksteal
EFFORT ?= 1
test: $(TESTED)
	$(PYTEST) --effort $(EFFORT) --ignore tests/browser

# Without the slow tests, and those that start a cluster or a browser.
quick: $(TESTED)
	$(PYTEST) -m 'not slow and not ray' --ignore tests/browser

# The same tests at full effort, then those that need another environment.
test-all: $(TESTED)
	$(MAKE) test EFFORT=10
	$(MAKE) test-light
	.ci/installed
	if .ci/browser; then $(MAKE) test-browser; else echo "the tests in a browser are left out" >&2; fi

# The tests of the floors that know no torch, where it is not installed: with all that the package asks for, save torch.
WITHOUT_TORCH := import importlib.metadata as m; print(*(r for r in m.requires("apcbatch") if r[:5] != "torch" and ";" not in r))
LIGHT := $(VENV)-light
test-light: $(BUILT)
	rm -rf $(LIGHT)
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/pip install --quiet pytest hypothesis jsonschema `$(BIN)/python -c '$(WITHOUT_TORCH)'`
	$(LIGHT)/bin/python -m pytest -q tests/store tests/data tests/plan tests/drafts tests/test_prefix.py tests/test_layout.py tests/test_floors.py

# The report in a real browser: the distribution's Chromium, which Playwright drives and never downloads.
test-browser: $(TESTED)
	$(BIN)/python -m tools.chromium
	$(BIN)/pip install --quiet `$(BIN)/python -c '$(call EXTRA,browser)'`
	$(BIN)/python -m pytest -q tests/browser

# Runs on a Ray cluster of simulated machines on this one.
test-ray: $(TESTED)
	$(BIN)/python -m pytest -q --effort 3 tests/cluster tests/ray

# The CUDA tests, and the sanitizers over the kernels' tests, with the python and the torch that see the GPU. racecheck
# is some hundred times slower than the kernel: a test for each kernel that shares memory between threads. It cannot run
# some of the library's bfloat16 products: tests with those are left out.
SANITIZE := --kernel-name kns=apcbatch --error-exitcode 9
# Why racecheck does not follow it: docs/performance-cuda.md.
NOT_UNDERSTOOD := --kernel-name-exclude kns=expert_chains_kernel --kernel-name-exclude kns=expert_tiles_kernel
RACES := tests/kernels/test_cuda.py::test_batch_in_place \
    'tests/kernels/test_cuda.py::test_bfloat16_scan_matches_float64[16]' \
    'tests/kernels/test_cuda.py::test_bfloat16_scan_matches_float64[64]' \
    tests/kernels/test_cuda.py::test_bfloat16_convolution_matches_float64 \
    'tests/kernels/test_cuda_rows.py::test_norms[257-dtype1]' 'tests/kernels/test_cuda_rows.py::test_a_softmax_route[16-2]' \
    'tests/kernels/test_cuda_rows.py::test_greedy[1024]' \
    'tests/kernels/test_cuda_rows.py::test_paged_attention[6-3-96-dtype1]' \
    'tests/kernels/test_cuda_experts.py::test_mixture[1-4-2]' 'tests/kernels/test_cuda_experts.py::test_mixture[9-4-2]' \
    'tests/kernels/test_cuda_experts.py::test_mixture[33-4-2]' \
    'tests/kernels/test_cuda.py::test_scans_of_short_sequences[torch.float32-16-5-64]' \
    'tests/kernels/test_cuda.py::test_convolutions_of_short_sequences[torch.bfloat16-4-5-64]' \
    'tests/kernels/test_cuda_heads.py::test_a_scan_matches_float64[torch.bfloat16-(2, 4, 128, 128)-delta]' \
    'tests/kernels/test_cuda_heads.py::test_a_scan_matches_float64[torch.float32-(2, 2, 6, 67)-ssd]' \
    'tests/kernels/test_cuda_heads.py::test_a_step_has_the_bits_of_the_scan[torch.float32-(2, 4, 128, 128)-delta]' \
    'tests/kernels/test_cuda_experts.py::test_few_tokens_are_grouped_where_they_are_chosen[True-64-6]'

test-cuda:
	APCBATCH_CUDA=1 $(PYTHON) setup.py build_ext --inplace
	$(PYTHON) -m pytest -q -m cuda
	$(PYTHON) -m pytest -q -m cuda --collect-only tests/kernels | grep :: | xargs -d '\n' -n 12 -P 2 \
	    timeout 600 compute-sanitizer --tool memcheck $(SANITIZE) $(PYTHON) -m pytest -q -m cuda
	timeout 600 compute-sanitizer --tool racecheck $(SANITIZE) $(NOT_UNDERSTOOD) $(PYTHON) -m pytest -q -m cuda $(RACES)

lint: $(BUILT)
	$(BIN)/pip install --quiet `$(BIN)/python -c '$(call EXTRA,lint)'`
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.h csrc/cuda/* tests/kernels/driver.cpp

soak: $(TESTED) sanitize
	$(BIN)/python -m tests.soak --seconds $(SECONDS)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# The kernels with a plain C++ driver under the address and undefined-behaviour sanitizers.
sanitize: $(TESTED)
	$(BIN)/python -m tests.kernels.sanitize --seconds 20

# The kernels with every compiler that is here (GCC, Clang, GCC for aarch64), with and without OpenMP, warnings as errors.
portability: $(TESTED)
	$(BIN)/python -m tests.kernels.portability

# Changes the code in 300 small ways, a fixed sample, and lists those that no test notices: about 35 minutes on two idle
# cores. Works in copies under build/mutants, and leaves all outcomes in build/mutants/outcomes.json.
mutants: $(TESTED)
	$(BIN)/pip install --quiet `$(BIN)/python -c '$(call EXTRA,mutants)'`
	$(BIN)/python -m tools.mutants

# Statements and branches that the suite executes, in every process that it starts; build/coverage/html shows the lines.
COVERAGE := $(BIN)/python -m coverage
coverage: EFFORT = 10
coverage: export COVERAGE_RCFILE := $(CURDIR)/tools/coverage.rc
coverage: export COVERAGE_FILE := $(CURDIR)/build/coverage/data
coverage: export PYTHONPATH := $(CURDIR)
coverage: $(TESTED)
	$(BIN)/pip install --quiet `$(BIN)/python -c '$(call EXTRA,mutants)'`
	rm -rf build/coverage
	-$(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) --effort $(EFFORT) --ignore tests/browser
	$(COVERAGE) combine -q
	$(COVERAGE) html -q -d build/coverage/html
	$(COVERAGE) report

# The source archive and a manylinux wheel for each supported Python that is here, in dist.
wheels:
	.ci/wheels dist

bench: $(BUILT)
	$(BIN)/python -m benchmarks.bench

clean:
	rm -rf $(VENV) $(LIGHT) $(DEMO) build dist *.egg-info apcbatch/*.so
