# Run `make setup` once before the other targets. PYTHON=... uses another environment.
PYTHON ?= .venv/bin/python

.PHONY: setup check test test-all test-rest test-long test-hosts test-tools docs wheel bench accelerator maxtext size map raises mutants notebooks

setup:  ## create a virtual environment with the pinned tools
	python3 -m venv .venv
	.venv/bin/python -m pip install -e '.[dev]'

check:  ## check format, lint and types: takes seconds
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff format --check --line-length 80 notebooks/*.ipynb
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyrefly check --python-interpreter-path $(PYTHON)

# `make test ROOM=program`: the room's files under jaxdist/ and tests/, with or without underscore.
ROOM_FILES = $(wildcard $(foreach r,$(ROOM) _$(ROOM),jaxdist/$(r) jaxdist/$(r).py) \
	tests/$(ROOM) tests/test_$(ROOM)*.py)

test:  ## run a sample of all tests, in minutes; with ROOM=data all tests of one room
ifdef ROOM
	$(if $(ROOM_FILES),,$(error There is no room $(ROOM): see docs/design/000-rooms.md))
	$(PYTHON) -m pytest -n 3 $(ROOM_FILES)
else
	$(PYTHON) -m pytest -n 3
endif

test-all:  ## run unit tests, contracts, doctests and documentation on 8 virtual devices: half an hour
	$(PYTHON) -m pytest -n 3 --dist worksteal --all

test-rest:  ## run the tests of `make test-all` that `make test` leaves out or shortens; of slow ones a sample
	$(PYTHON) -m pytest -n 3 --dist worksteal --rest

# A part goes on where an earlier run of it stopped, and is recorded in tests/records/long.tsv.
SEED ?= 0
test-long:  ## run `make test-all` with every row of its tables and fuzz tests, for hours; with PART=2/8 a part; with ROOM=data those of a room
	$(if $(and $(ROOM),$(if $(ROOM_FILES),,x)),$(error There is no room $(ROOM): see docs/design/000-rooms.md))
	$(PYTHON) -m pytest -n 3 --dist worksteal --long --timeout 1200 --hypothesis-seed $(SEED) \
		$(if $(PART),--part $(PART)) $(if $(ROOM),$(ROOM_FILES))

# In an environment of its own: other tests run as where Ray is not installed.
test-hosts:  ## run the jobs of the docs on Slurm and Ray with three nodes each, and record them in docs/machines/several-hosts.md; for root on Debian
	apt-get update -q
	apt-get install -y -q iproute2 nftables munge slurmctld slurmd slurm-client
	$(PYTHON) -m venv build/hosts
	build/hosts/bin/python -m pip install -q -e '.[test,ray]' 'ray[default]'
	build/hosts/bin/python -m tools.hosts

# An environment for each tool, below build/tools. A tool that fails does not keep the others from running.
test-tools:  ## run the programs of the docs that use PyTorch, pandas, MLflow and others, and record them in tests/records/tools.tsv: 20 minutes; with TOOL=torch one
	$(PYTHON) -m tools.other_tools $(TOOL)

docs:  ## build the site in build/site, warnings as errors; its code is run by `make test ROOM=documentation`
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

notebooks:  ## run all notebooks on 8 CPU devices and save their outputs; with NAMES="own_data porting" these
	$(PYTHON) -m tools.notebooks $(NAMES)

wheel:  ## build a wheel and an sdist into dist/
	$(PYTHON) -m build --no-isolation --outdir dist .

bench:  ## measure every claim, one line per claim
	$(PYTHON) -m benchmarks

accelerator:  ## check and measure one GPU or TPU; exits with 3 if JAX finds none
	$(PYTHON) -m benchmarks.accelerator

# MaxText pins its own versions of everything, so it gets an environment of its own.
maxtext:  ## compile training steps of MaxText and of jaxdist for the same slices, and write docs/machines/maxtext.md: 25 minutes, needs python3.12
	python3.12 -m venv build/maxtext/env
	build/maxtext/env/bin/python -m pip install -q --no-deps -r tools/maxtext/requirements.txt
	build/maxtext/env/bin/python -m pip install -q --no-deps maxtext==0.2.5 -e .
	JAX_PLATFORMS=cpu build/maxtext/env/bin/python -m tools.maxtext

size:  ## report the figures of the layout, with their definitions; never fails
	@$(PYTHON) -m tools.figures size
	@$(PYTHON) -m tools.calls

map:  ## print a table of rooms: files, lines, imports in and out, public names
	@$(PYTHON) -m tools.figures map

raises:  ## print a table of errors: each `raise`, and the test of `make test-all` that reaches it
	@$(PYTHON) -m tools.raises

# A part goes on where an earlier run of it stopped, and is recorded in tests/records/mutants.tsv.
mutants:  ## run the tests on 300 small faults of the package, and print which ones they miss: an hour; with PART=2/8 a part; with AGAINST=main compare with the record of that commit
	@$(PYTHON) -m tools.mutants $(if $(PART),--part $(PART)) $(if $(AGAINST),--against $(AGAINST))
