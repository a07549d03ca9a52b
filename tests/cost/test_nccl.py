"""Predicted collectives of NCCL, against published ones and simulated rings and trees."""

import dataclasses
import math
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist import cost
from jaxdist.hlo import KINDS
from tools import gpu_collectives

MIB = 1 << 20
NVLINK, NETWORK = cost.TABLE["nvlink-4"], cost.TABLE["infiniband-ndr"]
LINKS = cost.Links(NVLINK, NETWORK)


def _curve(link: cost.Link) -> cost.SizeCurve:
    assert link.curve is not None
    return link.curve


def test_size_curve_is_the_fit_of_eight_h200_alone() -> None:
    fitted = [row for row in gpu_collectives.PUBLISHED if row.fitted]
    assert {row.where for row in fitted} == {"8 H200, one host"}
    seconds = {
        row.num_bytes // MIB: 1.75 * row.num_bytes / row.bus_bandwidth / 1e9 for row in fitted
    }
    curve = _curve(NVLINK)
    # Many bytes: the bandwidth.
    rate = 1.75 * (16 << 30) / seconds[16 << 10]
    assert curve.switch_part == round(rate / NVLINK.bytes_per_second, 2)
    # What else 14 steps take.
    steps = [(seconds[mib] - 1.75 * mib * MIB / rate) / 14 for mib in (16, 64, 256)]
    assert curve.step_seconds == pytest.approx(round(sum(steps) / 3, 7))
    # Few bytes, at half of the bandwidth.
    small = (seconds[1] - 1.75 * MIB / (rate / 2)) / 14
    assert curve.small_step_seconds == pytest.approx(round(small, 7))


@pytest.mark.parametrize(
    "row",
    [row for row in gpu_collectives.PUBLISHED if row.num_bytes >= 16 * MIB],
    ids=lambda row: f"{row.where}, {row.num_bytes // MIB} MiB",
)
def test_published_all_reduces_are_predicted_within_a_quarter(
    row: gpu_collectives.Published,
) -> None:
    assert abs(row.predicted_seconds / row.seconds - 1) < 0.25


def test_the_page_has_the_predictions_of_the_model() -> None:
    text = gpu_collectives.PAGE.read_text()
    between = text.split(gpu_collectives.BEGIN)[1].split(gpu_collectives.END)[0]
    assert between.strip().splitlines() == gpu_collectives.make_table(), (
        "run python -m tools.gpu_collectives"
    )


@pytest.mark.parametrize(("hosts", "local"), [(1, 2), (1, 8), (2, 4), (4, 8), (3, 1)])
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_ring_takes_the_hops_of_one_piece_and_the_bytes_of_the_slowest_border(
    kind: str, hosts: int, local: int
) -> None:
    n, size = hosts * local, 4 << 30
    host = [gpu // local for gpu in range(n)]
    rounds = 2 if kind == "all-reduce" else 1
    # A piece starts at GPU 0 and goes round, without the hop that would bring it back.
    hops = [NVLINK if host[gpu] == host[gpu + 1] else NETWORK for gpu in range(n - 1)] * rounds
    waits = sum(5.2e-6 if link is NVLINK else 9.6e-6 for link in hops)
    # Every GPU hands all pieces but one to the next. At a border, each card takes its share.
    moved = rounds * (n - 1) * size / n
    rates = [450e9 * (1.07 if kind == "all-reduce" and hosts == 1 else 370 / 450)] * (local > 1)
    rates += [0.94 * 50e9 * local] * (hosts > 1)
    found = cost.collective_seconds(kind, n, size, LINKS, local=local)
    assert found == pytest.approx(waits + moved / min(rates))


@pytest.mark.parametrize(("hosts", "size"), [(128, 64 * MIB), (16, 16 * MIB), (128, 1 << 30)])
def test_tree_over_many_hosts_is_a_pipeline_with_the_best_number_of_chunks(
    hosts: int, size: int
) -> None:
    n = 8 * hosts
    # Up the tree and down again: 7 GPUs of the host, and the levels of the hosts.
    latencies = 2 * (7 * [5.2e-6] + (hosts - 1).bit_length() * [9.6e-6])
    moving = 2 * (n - 1) / n * size / min(8 * 0.94 * 50e9, 370e9)
    mean = sum(latencies) / len(latencies)
    times = [(k + len(latencies)) * (mean + moving / k) for k in range(1, 5000)]
    found = cost.seconds("xla", n, size, LINKS, 8)
    assert found == pytest.approx(min(times), rel=0.01)
    ring = 2 * ((n - hosts) * 5.2e-6 + (hosts - 1) * 9.6e-6) + moving
    assert found < ring


def test_group_of_one_gpu_in_each_host_has_one_network_card() -> None:
    size = 1 << 30
    one = cost.collective_seconds("all-gather", 4, size, LINKS, local=1)
    assert one == pytest.approx(3 * 9.6e-6 + 3 / 4 * size / 47e9)
    assert one == cost.collective_seconds("all-gather", 4, size, NETWORK)
    all_to_all = cost.collective_seconds("all-to-all", 32, size, LINKS, local=8)
    # Every GPU sends 24 of 32 parts over its own card: nobody else has them.
    assert all_to_all == pytest.approx(28 * 5.2e-6 + 3 * 9.6e-6 + 24 / 32 * size / 47e9)


@pytest.mark.parametrize("bandwidth", [365e9, 370e9])
def test_other_collectives_of_eight_h100_reach_the_published_bandwidth(bandwidth: float) -> None:
    size = 16 << 30
    for kind in ("all-gather", "reduce-scatter"):
        found = 7 / 8 * size / cost.collective_seconds(kind, 8, size, NVLINK)
        assert found == pytest.approx(bandwidth, rel=0.02)


def test_all_reduce_of_eight_a100_stays_below_the_limit_of_nccls_own_model() -> None:
    size = 16 << 30
    found = 7 / 4 * size / cost.seconds("xla", 8, size, cost.Links(cost.TABLE["nvlink-3"]))
    assert found == pytest.approx(235e9, rel=0.01)
    assert found < 235e9


@given(
    st.sampled_from(KINDS),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 10**9),
    st.integers(1, 10**9),
)
def test_more_bytes_never_take_less_time(
    kind: str, hosts: int, local: int, size: int, more: int
) -> None:
    less, longer = (
        cost.collective_seconds(kind, hosts * local, s, LINKS, local=local)
        for s in (size, size + more)
    )
    assert 0 <= less <= longer
    assert math.isfinite(longer)


def test_measured_links_have_no_curve(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "links.json"
    cost.save_links(path, [NVLINK])
    [loaded] = cost.load_links(path)
    assert loaded == dataclasses.replace(NVLINK, curve=None)
    size = 1 << 30
    found = cost.collective_seconds("all-gather", 8, size, loaded)
    assert found == 3 * NVLINK.alpha + 7 / 8 * size / NVLINK.bytes_per_second
    samples = [cost.Sample(c, b, 1e-4 + c * b / 1e9) for c in (1, 9) for b in (8, 8000)]
    assert cost.fitted(NVLINK, samples, 8, 1e12, 1.0, "here").link.curve is None


def test_curve_counts_only_if_all_links_of_a_group_have_one() -> None:
    plain = dataclasses.replace(NVLINK, curve=None)
    ethernet = cost.TABLE["ethernet-100"]
    for algorithm in cost.ALGORITHMS:
        mixed, without = (
            cost.seconds(algorithm, 32, 64 * MIB, cost.Links(link, ethernet), 8)
            for link in (NVLINK, plain)
        )
        assert mixed == without


def test_steps_of_other_algorithms_take_as_long_as_those_of_nccl() -> None:
    size = 1 << 30
    # 2 log2 8 steps of all bytes.
    tree = 6 * 5.2e-6 + 6 * size / 370e9
    assert cost.seconds("psgpu", 8, size, cost.Links(NVLINK)) == pytest.approx(tree)
