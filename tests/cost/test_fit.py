"""Links that are found again from the times that they predict."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxdist import cost
from jaxdist.errors import ArgumentError

COUNTS, SIZES = (1, 16), (1 << 10, 1 << 14, 1 << 18, 1 << 22)


@settings(deadline=None)
@given(
    st.sampled_from(["cpu-threads", "cpu-processes", "nvlink-4", "ethernet-10"]),
    st.floats(1e-6, 1e-4),
    st.floats(1e9, 1e11),
    st.floats(0, 1e-3),
    st.integers(2, 16),
    st.lists(st.floats(0.97, 1.03), min_size=8, max_size=8),
)
def test_link_is_found_again_from_times_with_noise(
    name: str, alpha: float, rate: float, dispatch: float, n: int, noise: list[float]
) -> None:
    known = cost.TABLE[name]
    true = cost.Link(name, alpha, rate, 1e10, "", known.medium)
    links = cost.Links(cost.for_devices(true, n))
    samples = []
    for (count, size), factor in zip(itertools.product(COUNTS, SIZES), noise, strict=True):
        if known.medium.is_shared:
            exact = cost.seconds("xla", n, count * size, links, num_operands=count)
        else:
            steps = 2 * (n - 1).bit_length()
            exact = count * (steps * alpha + 2 * (n - 1) / n * size / rate)
        samples.append(cost.Sample(count, size, factor * (dispatch + exact)))
    least, most = samples[4].seconds, samples[7].seconds
    assume(most > 3 * least)  # sizes that show the bandwidth
    assume(least > 3 * samples[0].seconds)  # counts that show the latency
    fit = cost.fitted(known, samples, n, 1e10, 1.0, "here")
    assert fit.error < 0.1
    assert fit.link.alpha == pytest.approx(alpha, rel=0.3)
    assert fit.link.bytes_per_second == pytest.approx(rate, rel=0.3)
    assert (fit.link.name, fit.link.medium, fit.link.source) == (name, known.medium, "here")


def test_times_that_fall_with_size_give_no_negative_numbers() -> None:
    samples = [
        cost.Sample(c, b, 1e-3 / (c * (1 + b))) for c, b in itertools.product((1, 2), (1, 1000))
    ]
    fit = cost.fitted(cost.TABLE["pcie-4"], samples, 4, 1e10, 1.0, "here")
    assert fit.link.alpha >= 0
    assert fit.link.bytes_per_second == cost.TABLE["pcie-4"].bytes_per_second, "none was seen"
    assert fit.dispatch_seconds >= 0


@pytest.mark.parametrize("samples", [[], [(1, 8)], [(1, 8), (2, 8)], [(1, 8), (1, 16)]])
def test_too_few_samples_are_refused(samples: list[tuple[int, int]]) -> None:
    times = [cost.Sample(c, b, 1e-3) for c, b in samples]
    with pytest.raises(ArgumentError, match="two sizes and two counts or more"):
        cost.fitted(cost.TABLE["pcie-4"], times, 4, 1e10, 1.0, "here")
