# `make setup` once, then the rest. PYTHON=... uses another environment.
PYTHON ?= .venv/bin/python

.PHONY: setup check test test-all test-long docs bench accelerator size map

setup:  ## virtual environment with the pinned tools
	python3 -m venv .venv
	.venv/bin/python -m pip install -e '.[dev]'

check:  ## format, lint, types: seconds
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pyrefly check --python-interpreter-path $(PYTHON)

# `make test ROOM=program`: the room's files under jaxdist/ and tests/, with or without underscore.
ROOM_FILES = $(wildcard $(foreach r,$(ROOM) _$(ROOM),jaxdist/$(r) jaxdist/$(r).py) \
	tests/$(ROOM) tests/test_$(ROOM)*.py)

test:  ## a sample of everything, in minutes; with ROOM=data all tests of one room
ifdef ROOM
	$(if $(ROOM_FILES),,$(error There is no room $(ROOM): see docs/design/000-rooms.md))
	$(PYTHON) -m pytest -n 3 $(ROOM_FILES)
else
	$(PYTHON) -m pytest -n 3
endif

test-all:  ## unit tests, contracts, doctests, documentation, on 8 virtual devices: half an hour
	$(PYTHON) -m pytest -n 3 --all

test-long:  ## all of `make test-all`, and every row of its tables and fuzzes: an hour or two
	$(PYTHON) -m pytest -n 3 --long --timeout 1200

docs:  ## every link and every code block of README, docs/ and notebooks/, warnings as errors
	$(PYTHON) -m pytest tests/test_documentation.py

bench:  ## one line per claim
	$(PYTHON) -m benchmarks

accelerator:  ## what only a GPU or TPU can show, on one of them; exits with 3 where there is none
	$(PYTHON) -m benchmarks.accelerator

size:  ## a report, never a gate: the figures of the layout, with their definitions
	@$(PYTHON) -m tools.figures size
	@$(PYTHON) -m tools.calls

map:  ## a table of rooms: files, lines, arrows in and out, public names
	@$(PYTHON) -m tools.figures map
