"""Eight CPU devices for every test and doctest, asked for before anything touches JAX.

XLA compiles them without optimizing machine code, which is a quarter of their time. Its passes over
the HLO are the same, so tests of compiled HLO see what users get. Tests that are marked
`optimized`, processes that tests start, and all tests where `JAX_DISABLE_MOST_OPTIMIZATIONS` is
set from outside (CI's part on the newest JAX sets it to 0), have JAX's own setting.

What one test compiles, another one reads: JAX's cache of compiled programs is a folder of the run.
`JAXDIST_TESTS_COMPILED=FOLDER` keeps it for later runs on this machine. JAX does not write a file
at once. Where a process reads a part of one, JAX warns and compiles, so pytest ignores the warning.

Rank promotion is an error: a missing dim hides most easily where arrays are split over replicas.
(Dtype promotion cannot be one as well, since Flax relies on it.)
"""

import ctypes
import gc
import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Iterator

# Tests of accelerators are run with JAX_PLATFORMS set from outside.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# xdist tells its workers a width of the screen, to which reports would fit themselves.
os.environ.pop("COLUMNS", None)

import flax.nnx as nnx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Loaded here, before `tests/conftest.py` imports the package.
pytest_plugins = ["tools.record_raises", "tools.parts"]

# A shell ignores it for what it starts in the background, and tests raise it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A process of a job has as many as the test that started it says, and `make accelerator` has
# started JAX already.
if not {"JAXDIST_TESTS_OF_JOB", "JAXDIST_TESTS_ON_DEVICE"} & os.environ.keys():
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# How long an example takes depends on what else the machine does. Tests have a timeout.
hypothesis.settings.register_profile("jaxdist", deadline=None)
hypothesis.settings.load_profile("jaxdist")

_COMPILED = "JAXDIST_TESTS_COMPILED"
_OPTION = "jax_disable_most_optimizations"
if _OPTION.upper() not in os.environ:
    jax.config.update(_OPTION, True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many tests run; see `tests.tables`."""
    parser.addoption("--all", action="store_true", help="run all tests but those marked `long`")
    parser.addoption("--rest", action="store_true", help="run what --all adds to the short run")
    parser.addoption("--long", action="store_true", help="run tests marked `long` as well")


def pytest_configure(config: pytest.Config) -> None:
    """Tables, fuzzes and property tests ask `tests.tables` how long they may be."""
    if hasattr(config, "workerinput"):
        return  # The process that started this one has decided, and its environment is here, too.
    # Who names files or tests wants all of them.
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    length = "all" if config.getoption("--all") or named else "short"
    length = "rest" if config.getoption("--rest") else length
    os.environ["JAXDIST_TESTS"] = "long" if config.getoption("--long") else length
    if _COMPILED not in os.environ:
        os.environ[_COMPILED] = tempfile.mkdtemp(prefix="jaxdist-compiled-")
        config.add_cleanup(_delete_compiled)


def pytest_sessionstart() -> None:
    """In each process of a run, the controller of xdist as well."""
    _use_compiled()


def _delete_compiled() -> None:
    shutil.rmtree(os.environ.pop(_COMPILED), ignore_errors=True)


def _use_compiled() -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", os.environ[_COMPILED])
    compilation_cache.reset_cache()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the length of the run leaves out."""
    # Not at the top: what it imports is not yet importable where conftest.py is read.
    from tests.tables import chosen, with_processes_first

    kept = chosen(items)
    if len(kept) < len(items):
        left = set(map(id, kept))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
    items[:] = with_processes_first(kept)


@pytest.fixture(autouse=True)
def _optimized(request: pytest.FixtureRequest) -> Iterator[None]:
    """Machine code is optimized as users have it, where the test is marked so."""
    before = jax.config.read(_OPTION)
    if request.node.get_closest_marker("optimized") is not None:
        jax.config.update(_OPTION, False)
    yield
    jax.config.update(_OPTION, before)


class _Memory:
    """Gives memory back where a process of tests has grown a lot.

    JAX keeps each program that it compiles for an operation, and the C library keeps what is freed.
    With three processes the whole suite would need more than 24 GiB.
    """

    growth = 2 * 2**30

    def __init__(self) -> None:
        self._most = self.growth

    def check(self) -> None:
        """Drop JAX's caches where the process holds more than it may."""
        if self._held() < self._most:
            return
        gc.collect()
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        self._most = self._held() + self.growth

    @staticmethod
    def _held() -> int:
        statm = pathlib.Path("/proc/self/statm")
        if not statm.exists():
            return 0
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_MEMORY = _Memory()
_LOGGER = logging.getLogger("jaxdist")


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """What a test or an Example sets for the whole process counts only there."""
    from jaxdist._processes import settings

    before = dict(settings._chosen)
    yield
    settings._chosen.clear()
    settings._chosen.update(before)
    level = _LOGGER.level
    _LOGGER.setLevel(logging.NOTSET)
    assert level == logging.NOTSET, "this test left a level of the logger behind: use caplog"


@pytest.fixture(autouse=True)
def _compiled() -> Iterator[None]:
    """A test that uses another cache of compiled programs, or none, does so alone."""
    yield
    if getattr(jax.config, "jax_compilation_cache_dir", None) != os.environ[_COMPILED]:
        _use_compiled()


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    yield
    _MEMORY.check()


@pytest.fixture(autouse=True, scope="session")
def _names_for_doctests(doctest_namespace: dict[str, object]) -> None:
    """What every Example may use without importing it: the libraries and the public names."""
    import jaxdist

    public = {
        name: value
        for name in dir(jaxdist)
        if not name.startswith("_")
        and not isinstance(value := getattr(jaxdist, name), types.ModuleType)
    }
    libraries = {"np": np, "jax": jax, "jnp": jnp, "optax": optax, "nnx": nnx, "jaxdist": jaxdist}
    rooms = {name: getattr(jaxdist, name) for name in ("fit", "partition", "training")}
    doctest_namespace.update({**public, **libraries, **rooms})
