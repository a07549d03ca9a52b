"""`config.compilation_cache`: what one process has compiled, another one does not compile again."""

import ast
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist.errors import ArgumentError

# Prints the weights after a step, and how many programs JAX asked for, found and wrote.
SCRIPT = """
import collections, os, sys
import jax, numpy as np
import jaxdist

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
if sys.argv[1:]:
    jaxdist.config.compilation_cache(sys.argv[1])
    jaxdist.testing.virtual_devices(2)
    strategy = jaxdist.MirroredStrategy()
else:
    strategy = jaxdist.MultiWorkerMirroredStrategy()

def step(w, x):
    replica = jaxdist.get_replica_context()
    grad = jax.grad(lambda w: jax.numpy.tanh(x @ w).sum())(w)
    return w - 0.1 * replica.all_reduce("sum", grad)

x = jaxdist.PerReplica([np.full((2, 3), 0.5, "float32")] * len(jax.local_devices()))
w = strategy.run(step, (np.ones(3, "float32"), x))
names = ("compile_requests_use_cache", "cache_hits", "cache_misses")
found = [counts["/jax/compilation_cache/" + name] for name in names]
print([np.asarray(w).tolist(), found, jax.process_index(), jax.config.jax_compilation_cache_dir])
"""


def _run(*command: str, **variables: str) -> list[Any]:
    """What each process has printed."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
    )
    assert done.returncode == 0, done.stderr
    lines = [line[line.index("[[") :] for line in done.stdout.splitlines() if "[[" in line]
    return [ast.literal_eval(line) for line in lines]


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def restored() -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before: Mapping[str, Any] = {name: getattr(jax.config, name) for name in names}
    yield
    jaxdist.config.compilation_cache(None)
    for name, value in before.items():
        jax.config.update(name, value)


def _compile(number: int) -> None:
    jax.jit(lambda x: jnp.sin(x) * number)(jnp.ones(number))


def test_a_second_process_compiles_nothing_and_has_the_same_numbers(
    script: str, tmp_path: pathlib.Path
) -> None:
    folder = str(tmp_path / "new" / "cache")
    [[first, (requests, hits, misses), _, _]] = _run(script, folder)
    assert (hits, misses) == (0, requests)
    assert requests > 0
    [[second, found, _, _]] = _run(script, folder)
    assert found == [requests, requests, 0]
    assert second == first


@pytest.mark.slow
def test_the_launcher_passes_the_folder_on_and_process_0_compiles_nothing_again(
    script: str, tmp_path: pathlib.Path
) -> None:
    folder = str(tmp_path / "cache")
    variables = {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    jobs = [
        sorted(_run("-m", "jaxdist", "launch", "-n", "2", script, **variables), key=lambda p: p[2])
        for _ in range(2)
    ]
    assert [process[3] for job in jobs for process in job] == [folder] * 4
    assert len({str(process[0]) for job in jobs for process in job}) == 1
    (first, _), (second, _) = jobs
    requests = first[1][0]
    assert first[1] == [requests, 0, requests]
    assert second[1] == [requests, requests, 0]


@pytest.mark.usefixtures("restored")
def test_the_folder_can_be_changed_and_switched_off(tmp_path: pathlib.Path) -> None:
    for name, number in (("a", 3), ("b", 5)):
        jaxdist.config.compilation_cache(tmp_path / name)
        _compile(number)
    jaxdist.config.compilation_cache(None)
    _compile(7)
    files = {path.name: len(list(path.glob("*-cache"))) for path in tmp_path.iterdir()}
    assert files.keys() == {"a", "b"}
    assert min(files.values()) > 0


def test_a_program_for_devices_that_are_not_there_is_not_kept(tmp_path: pathlib.Path) -> None:
    jaxdist.config.compilation_cache(tmp_path)
    program = jaxdist.MirroredStrategy(["cpu:0"]).lower(lambda x: x * 2 + 1, (jnp.ones(3),))
    for _ in range(2):
        program.compile_for("v5e:2x2")
    assert [path.name for path in tmp_path.glob("*lambda*")] == []


@pytest.mark.usefixtures("restored")
def test_a_threshold_of_the_user_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "100")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 100.0)
    jaxdist.config.compilation_cache(tmp_path / "cache")
    _compile(11)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("restored")
def test_a_folder_that_cannot_be_used_is_an_error_and_changes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    before = getattr(jax.config, "jax_compilation_cache_dir", None)
    for directory, what in (
        ("file", "cannot be written"),
        ("file/inside", "cannot be written"),
        ("gs://bucket/cache", "which has the scheme 'gs'"),
        ("", "directory"),
    ):
        with pytest.raises(ArgumentError, match=what):
            jaxdist.config.compilation_cache(directory)
    assert getattr(jax.config, "jax_compilation_cache_dir", None) == before
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
