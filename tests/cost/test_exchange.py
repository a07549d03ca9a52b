"""How much further the bytes of an all-to-all go than those of an all-gather."""

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist import cost
from jaxdist.errors import ArgumentTypeError
from tests.strategies.oracle import refused


def _make_slice(*lengths: int) -> list[Any]:
    coords = itertools.product(*map(range, lengths))
    return [SimpleNamespace(platform="tpu", coords=place) for place in coords]


def _count_crossing(lengths: tuple[int, ...], wrap: bool) -> float:
    """Return the time of an all-to-all by that of an all-gather of as many bytes, from the links.

    Every chip sends one byte. Half of the bytes of each half of the slice cross its middle, over
    the links there. In an all-gather a chip sends over all of its links at once.
    """
    chips = 1
    for n in lengths:
        chips *= n
    worst = max(lengths)
    across = chips / worst * (2 if wrap else 1)
    exchange = chips / 2 / 2 / across
    links = len(lengths) * (2 if wrap else 1)  # of a chip in a corner
    return exchange * links


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (8, 8), (16, 16), (4, 4, 4), (8, 8, 8), (4, 4, 8)])
def test_the_factor_follows_from_the_links_across_the_middle(
    lengths: tuple[int, ...], wrap: bool
) -> None:
    found = cost.exchange_factor(_make_slice(*lengths))
    assert found == pytest.approx(_count_crossing(lengths, wrap))


def test_other_devices_and_small_groups_have_no_factor() -> None:
    assert cost.exchange_factor(jax.devices()) == 1
    assert cost.exchange_factor([]) == 1
    assert cost.exchange_factor(_make_slice(1, 1, 1)) == 1
    assert cost.exchange_factor(_make_slice(1, 4, 1)) == 1


def test_what_is_no_device_is_named() -> None:
    for wrong in ([1], [jnp.ones(2)], jnp.ones(2)):
        with refused(ArgumentTypeError, "cost.exchange_factor was given devices", "jax.devices()"):
            cost.exchange_factor(wrong)  # type: ignore[arg-type]
