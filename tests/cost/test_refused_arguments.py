"""Costs refuse what is no device, no layout, no kind of collective and no file, by name."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdist
from jaxdist import cost
from jaxdist.errors import ArgumentError, ArgumentTypeError, JaxdistError
from tests.strategies.oracle import refused

LINK = cost.TABLE["nvlink-4"]

Row = tuple[Callable[[], Any], type[JaxdistError], tuple[str, ...]]
ROWS: dict[str, Row] = {
    "a chip of numbers": (
        lambda: cost.devices_per_chip([1, 2]),
        ArgumentTypeError,
        ("cost.devices_per_chip was given devices with 1", "jax.devices('tpu')"),
    ),
    "links of a mesh": (
        lambda: cost.links_of(jaxdist.MirroredStrategy().layout.mesh),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("cost.links_of was given layout=", "Pass strategy.layout"),
    ),
    "links of an array": (
        lambda: cost.links_of(jnp.ones(2)),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("cost.links_of was given layout=", "Pass strategy.layout"),
    ),
    "a worker of an array": (
        lambda: cost.worker_of(jnp.ones(2)),
        ArgumentTypeError,
        ("cost.worker_of was given device=", "jax.devices()[0]"),
    ),
    "a worker of a number": (
        lambda: cost.worker_of(jax.devices()[0].id),
        ArgumentTypeError,
        ("cost.worker_of was given device=0", "jax.devices()[0]"),
    ),
    "no kind of collective": (
        lambda: cost.collective_seconds("all-sum", 4, 8, LINK),
        ArgumentError,
        ("kind='all-sum'", "all-gather"),
    ),
    "bytes that are a text": (
        lambda: cost.collective_seconds("all-gather", 4, "8", LINK),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("cost.collective_seconds was given num_bytes='8'", "a finite number"),
    ),
    "fewer bytes than none": (
        lambda: cost.collective_seconds("all-gather", 4, -8, LINK),
        ArgumentError,
        ("num_bytes=-8", "from 0 up"),
    ),
    "infinitely many bytes": (
        lambda: cost.collective_seconds("all-gather", 4, float("inf"), LINK),  # type: ignore[arg-type]
        ArgumentError,
        ("num_bytes=inf", "a finite number"),
    ),
    "a file that is a number": (
        lambda: cost.load_links(3),  # type: ignore[arg-type]
        ArgumentTypeError,
        ("cost.load_links was given path=3", "path='links.json'"),
    ),
    "a file without a name": (
        lambda: cost.load_links(""),
        ArgumentError,
        ("cost.load_links was given path=''", "which names no file"),
    ),
    "a name with a null character": (
        lambda: cost.load_links("links\0.json"),
        ArgumentError,
        ("cost.load_links was given path='links\\x00.json'", "no null character"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_an_argument_without_a_cost_is_refused_by_name(name: str) -> None:
    call, error, parts = ROWS[name]
    with refused(error, *parts) as caught:
        call()
    assert str(caught.value).count("\n\n") == 2


def test_notes_that_json_cannot_write_leave_the_file_as_it_is(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "links.json"
    cost.save_links(path, [LINK], {"host": "a"})
    before = path.read_text()
    parts = "cost.save_links was given notes=", "not JSON serializable", "Turn arrays into lists"
    with refused(ArgumentTypeError, *parts):
        cost.save_links(path, [LINK], {"host": jnp.ones(2)})
    assert path.read_text() == before
