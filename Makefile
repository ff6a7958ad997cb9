# make run: train the example on this machine. make test: all checks but the slow ones.
.PHONY: run test test-slow test-slurm test-compose test-network test-learning wheels lint install clean

VENV := .venv
PY := $(VENV)/bin/python
EXAMPLE ?= examples/sort-digits.toml
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes: none of them should compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

run: install
	$(VENV)/bin/jigsaw run $(EXAMPLE)

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml deploy/constraints-cpu.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "JigsawRL needs Python 3.11 or newer as python3" >&2; exit 1; }
	@python3 -c 'import venv, ensurepip' 2>/dev/null || \
		{ echo "Python's venv is missing: apt-get install python3-venv" >&2; exit 1; }
	python3 -m venv $(VENV)
	$(PY) -m pip install -q -c deploy/constraints-cpu.txt \
		-e '.[cli,services,otel,tasks,torch,tracking,dev]'
	touch $@

lint: install
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test: lint
	$(PY) -m pytest -m "not slow and not learning and not gpu and not slurm and not compose and not network"

test-slow: install
	$(PY) -m pytest -m "slow and not gpu"

test-slurm: install
	$(PY) -m pytest -m slurm

test-network: install
	$(PY) -m pytest -m network

test-compose: install
	deploy/docker/one-machine.sh
	$(PY) -m pytest -m compose

# For images that are built without an index: by this machine's pip, so its Python must be the images' 3.11.
wheels: deploy/wheels/.made

deploy/wheels/.made: $(VENV)/.installed pyproject.toml deploy/constraints-cpu.txt
	$(PY) -m pip wheel -q -c deploy/constraints-cpu.txt -w deploy/wheels \
		hatchling editables '.[cli,services,tasks,torch]'
	rm -f deploy/wheels/jigsawrl-*
	touch $@

test-learning: install
	$(PY) -m pytest -m "learning and not gpu"

clean:
	rm -rf $(VENV) deploy/wheels runs .mypy_cache .ruff_cache .pytest_cache
