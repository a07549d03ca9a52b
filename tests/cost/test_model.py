"""Predicted times, against simulated messages and against what was measured."""

import itertools
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxdist
from jaxdist import cost
from jaxdist.errors import ArgumentError, ArgumentTypeError, ConfigError

WIRES = [link for link in cost.TABLE.values() if not link.medium.is_shared]


class Messages:
    """Exchanges between simulated replicas: counts what the busiest one sends."""

    def __init__(self, n: int, size: int) -> None:
        self.values = np.arange(n * size, dtype=np.int64).reshape(n, size)
        self.total = self.values.sum(axis=0)
        self.steps = 0
        self.busiest = 0

    def step(self, sends: dict[tuple[int, int], slice], *, add: bool) -> None:
        """All messages of one step: `(from, to)` and which elements."""
        self.steps += 1
        self.busiest += max(self.values[s][part].size for (s, _), part in sends.items())
        taken = {pair: self.values[pair[0]][part].copy() for pair, part in sends.items()}
        for (pair, part), sent in zip(sends.items(), taken.values(), strict=True):
            self.values[pair[1]][part] = sent + (self.values[pair[1]][part] if add else 0)

    def ring(self) -> None:
        n, size = self.values.shape
        part = [slice(i * size // n, (i + 1) * size // n) for i in range(n)]
        for k in range(n - 1):
            self.step({(r, (r + 1) % n): part[(r - k) % n] for r in range(n)}, add=True)
        for k in range(n - 1):
            self.step({(r, (r + 1) % n): part[(r + 1 - k) % n] for r in range(n)}, add=False)

    def halving_doubling(self) -> None:
        n, size = self.values.shape
        power = 1 << (n.bit_length() - 1)
        whole = slice(0, size)
        extra = range(power, n)
        if extra:
            self.step({(r, r - power): whole for r in extra}, add=True)
        held = dict.fromkeys(range(power), (0, size))
        history = []
        for bit in (power >> i for i in range(1, power.bit_length())):
            sends = {}
            history.append((bit, dict(held)))
            for r, (low, high) in list(held.items()):
                middle = (low + high) // 2
                mine, other = ((low, middle), (middle, high))[:: 1 if not r & bit else -1]
                sends[r, r ^ bit] = slice(*other)
                held[r] = mine
            self.step(sends, add=True)
        for bit, before in reversed(history):
            self.step({(r, r ^ bit): slice(*held[r]) for r in range(power)}, add=False)
            held = before
        if extra:
            self.step({(r - power, r): whole for r in extra}, add=False)

    def tree(self) -> None:
        n, size = self.values.shape
        whole = slice(0, size)
        distances = [1 << i for i in range((n - 1).bit_length())]
        for d in distances:
            self.step({(r, r - d): whole for r in range(d, n, 2 * d)}, add=True)
        for d in reversed(distances):
            self.step({(r - d, r): whole for r in range(d, n, 2 * d)}, add=False)


ORACLES = {"xring": Messages.ring, "rechd": Messages.halving_doubling, "psgpu": Messages.tree}


@pytest.mark.parametrize("n", range(2, 10))
@pytest.mark.parametrize("algorithm", sorted(ORACLES))
def test_time_over_wires_is_that_of_the_messages_of_the_algorithm(algorithm: str, n: int) -> None:
    size = 5040 * 8
    played = Messages(n, size)
    ORACLES[algorithm](played)
    assert (played.values == played.total).all(), "the simulation itself is an all-reduce"
    link = cost.TABLE["pcie-4"]
    wanted = played.steps * link.alpha + 8 * played.busiest / link.bytes_per_second
    assert cost.seconds(algorithm, n, 8 * size, cost.Links(link)) == pytest.approx(wanted)


@given(
    st.sampled_from(WIRES),
    st.sampled_from(WIRES),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 10**10),
)
def test_nothing_is_predicted_to_beat_xla_by_published_numbers(
    inner: cost.Link, outer: cost.Link, local: int, workers: int, size: int
) -> None:
    links = cost.Links(inner, outer if workers > 1 else None)
    [(first, least), *others] = cost.cheapest(local * workers, size, links, local)
    assert first == "xla"
    assert all(least <= other for _, other in others)


@given(st.sampled_from(["cpu-threads", "cpu-processes"]), st.integers(1, 16), st.integers(1, 10**9))
def test_nothing_is_predicted_to_beat_xla_between_cpu_devices(name: str, n: int, size: int) -> None:
    for local in (d for d in range(1, n + 1) if n % d == 0):
        assert cost.cheapest(n, size, _shared(name, n), local)[0][0] == "xla"


def _shared(name: str, n: int) -> cost.Links:
    from jaxdist.cost import for_devices

    link = for_devices(cost.TABLE[name], n)
    return cost.Links(link, link if name == "cpu-processes" else None)


# What PERF.md measured, in ms: (link, replicas, local, operands, bytes of each, ms)
MEASURED = [
    ("cpu-threads", 2, 2, 400, 1 << 10, 4.66),
    ("cpu-threads", 4, 4, 400, 1 << 10, 22.3),
    ("cpu-threads", 8, 8, 400, 1 << 10, 76.3),
    ("cpu-threads", 2, 2, 4, 16 << 20, 26.8),
    ("cpu-threads", 4, 4, 4, 16 << 20, 47.1),
    ("cpu-threads", 8, 8, 4, 16 << 20, 87.5),
    ("cpu-processes", 2, 1, 1, 4 << 10, 0.44),
    ("cpu-processes", 2, 1, 1, 64 << 20, 98.1),
    ("cpu-processes", 2, 1, 100, 4 << 10, 27.4),
    ("cpu-processes", 4, 2, 100, 4 << 10, 93.8),
    ("cpu-processes", 4, 2, 1, 64 << 20, 181),
]


@pytest.mark.parametrize(("name", "n", "local", "operands", "size", "ms"), MEASURED)
def test_prediction_for_xla_is_what_was_measured_within_a_factor_of_two(
    name: str, n: int, local: int, operands: int, size: int, ms: float
) -> None:
    predicted = cost.seconds("xla", n, operands * size, _shared(name, n), local, operands)
    assert 0.5 <= predicted * 1e3 / ms <= 2


def test_two_levels_move_only_a_part_across() -> None:
    inner, outer = cost.TABLE["pcie-5"], cost.TABLE["ethernet-10"]
    links = cost.Links(inner, outer)
    size, local, workers = 8_000_000, 4, 2
    least = cost.seconds("xring", workers, size // local, cost.Links(outer))
    inside = cost.seconds("xring", local, size, cost.Links(inner))
    found = cost.seconds("xring/xring", local * workers, size, links, local)
    assert found == pytest.approx(inside + least)
    assert found < cost.seconds("xring", local * workers, size, links, local) / 3


def test_pack_threshold_is_where_copying_costs_what_a_message_does() -> None:
    for link in cost.TABLE.values():
        size = cost.pack_below(link)
        copies = 2 * size / link.memory_bytes_per_second
        assert copies == pytest.approx(link.alpha, rel=0.01), link.name


def test_every_link_has_a_source_and_no_number_that_cannot_be() -> None:
    for name, link in cost.TABLE.items():
        assert link.name == name
        assert link.source
        assert 0 < link.alpha < 1e-3
        assert 1e9 < link.bytes_per_second < 1e13
        assert 1e10 < link.memory_bytes_per_second < 1e13


def test_one_replica_needs_no_time() -> None:
    links = cost.Links(cost.TABLE["pcie-4"])
    assert [t for _, t in cost.cheapest(1, 1000, links)] == [0.0] * 5


@pytest.mark.parametrize("name", ["gloo", "xla/", "xla/xla/xla", ""])
def test_unknown_algorithm_is_refused(name: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"there is no all-reduce of that name|algorithm is a string"
    ):
        cost.seconds(name, 2, 8, cost.Links(cost.TABLE["pcie-4"]))


def test_workers_that_do_not_divide_the_replicas_are_refused() -> None:
    with pytest.raises(ArgumentError, match="num_replicas=6 and local=4"):
        cost.seconds("xla/xla", 6, 8, cost.Links(cost.TABLE["pcie-4"]), 4)


def test_cpu_processes_of_one_machine_are_workers_though_they_are_in_one_slice() -> None:
    devices = [
        SimpleNamespace(platform="cpu", device_kind="cpu", process_index=i // 2, slice_index=0)
        for i in range(4)
    ]
    layout: Any = SimpleNamespace(devices=devices, platform="cpu")
    links = cost.links_of(layout)
    assert (links.inner.name, links.across.name) == ("cpu-processes", "cpu-processes")
    assert [cost.worker_of(d) for d in devices] == [0, 0, 1, 1]


def _layout(platform: str, kind: str, workers: int, slices: bool) -> Any:
    devices = [
        SimpleNamespace(
            platform=platform,
            device_kind=kind,
            process_index=i,
            **({"slice_index": i % workers} if slices else {}),
        )
        for i in range(workers if not slices else 2 * workers)
    ]
    return SimpleNamespace(devices=devices, platform=platform)


@pytest.mark.parametrize(
    ("platform", "kind", "workers", "slices", "inner", "outer"),
    [
        ("tpu", "TPU v5 lite", 1, True, "tpu-v5e-ici", None),
        ("tpu", "TPU v5 lite", 2, True, "tpu-v5e-ici", "tpu-v5e-dcn"),
        ("tpu", "TPU v5p", 2, True, "tpu-v5p-ici", "tpu-v5p-dcn"),
        ("tpu", "TPU v5", 2, True, "tpu-v5p-ici", "tpu-v5p-dcn"),
        ("tpu", "TPU v6 lite", 1, True, "tpu-v6e-ici", None),
        ("tpu", "TPU7x", 2, True, "tpu-7x-ici", "tpu-7x-dcn"),
        ("gpu", "NVIDIA H100 80GB HBM3", 2, False, "nvlink-4", "infiniband-ndr"),
        ("gpu", "NVIDIA H100 PCIe", 1, False, "pcie-5", None),
        ("gpu", "Tesla V100-SXM2-16GB", 1, False, "nvlink-2", None),
        ("gpu", "Tesla T4", 2, False, "pcie-3", "ethernet-25"),
        ("cpu", "cpu", 2, False, "cpu-processes", "cpu-processes"),
    ],
)
def test_links_follow_from_the_devices(
    platform: str, kind: str, workers: int, slices: bool, inner: str, outer: str | None
) -> None:
    links = cost.links_of(_layout(platform, kind, workers, slices))
    assert (links.inner.name, links.outer and links.outer.name) == (inner, outer)


@pytest.mark.parametrize(
    ("domains", "hosts", "gpus", "kind", "inner"),
    [(4, 1, 8, "NVIDIA H100 80GB HBM3", "nvlink-4"), (2, 18, 4, "NVIDIA GB200", "nvlink-5")],
)
def test_described_gpus_are_told_apart_by_nvlink_domain(
    domains: int, hosts: int, gpus: int, kind: str, inner: str
) -> None:
    """As the CUDA plugin describes `4x1x8` and `2x18x4`: `slice_index` is 0 on all."""
    places = list(itertools.product(range(domains), range(hosts), range(gpus)))
    devices = [
        SimpleNamespace(
            platform="gpu",
            device_kind=kind,
            process_index=domain * hosts + host,
            slice_index=0,
            coords=[domain, host, gpu],
        )
        for domain, host, gpu in places
    ]
    assert [cost.worker_of(d) for d in devices] == [domain for domain, _, _ in places]
    layout: Any = SimpleNamespace(devices=devices, platform="gpu")
    links = cost.links_of(layout)
    assert links.inner.name == inner
    assert links.outer is not None


def test_unknown_device_is_a_guess_that_says_so() -> None:
    links = cost.links_of(_layout("gpu", "Zeta 9", 1, False))
    assert links.inner.source.startswith("a guess: the table has no row for 'Zeta 9'")


def test_cpu_devices_wait_for_each_other() -> None:
    alphas = [
        cost.links_of(jaxdist.MirroredStrategy(jax.devices()[:n]).layout).inner.alpha
        for n in (2, 4, 8)
    ]
    assert alphas == pytest.approx([6e-6, 12e-6, 24e-6])


def test_measured_links_come_before_the_table(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    slow = cost.Link("cpu-threads", 1e-3, 1e9, 2e9, "here", cost.Medium.MEMORY, 1.5)
    path = tmp_path / "links.json"
    cost.save_links(path, [slow], {"devices": 8})
    assert cost.load_links(path) == (slow,)
    layout = jaxdist.MirroredStrategy().layout
    try:
        assert jaxdist.config.links(path) == (slow,)
        assert cost.links_of(layout).inner.alpha == pytest.approx(8e-3)
    finally:
        assert jaxdist.config.links(None) == ()
    monkeypatch.setenv("JAXDIST_LINKS", str(path))
    assert cost.links_of(layout).inner.source == "here"
    monkeypatch.delenv("JAXDIST_LINKS")
    assert cost.links_of(layout).inner == cost.links_of(layout).inner
    assert cost.links_of(layout).inner.source.startswith("PERF")


GOOD = {
    "name": "pcie-4",
    "alpha": 1e-6,
    "bytes_per_second": 1e9,
    "memory_bytes_per_second": 1e9,
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a file of links"),
        (json.dumps({"version": 9, "links": []}), "version 9"),
        (json.dumps({"version": 1}), "no list"),
        (json.dumps({"version": 1, "links": [3]}), r"links\[0\] .* is 3"),
        (json.dumps({"version": 1, "links": [{**GOOD, "name": "x"}]}), "no link named 'x'"),
        (json.dumps({"version": 1, "links": [{**GOOD, "alpha": -1}]}), "alpha of the link"),
        (json.dumps({"version": 1, "links": [{**GOOD, "alpha": True}]}), "is True"),
        (json.dumps({"version": 1, "links": [{**GOOD, "bytes_per_second": 0}]}), "above 0"),
        (json.dumps({"version": 1, "links": [{"name": "pcie-4"}]}), "alpha .* is None"),
    ],
)
def test_file_that_cannot_be_used_is_named_with_its_entry(
    tmp_path: pathlib.Path, monkeypatch: Any, content: str, message: str
) -> None:
    path = tmp_path / "links.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        jaxdist.config.links(path)
    monkeypatch.setenv("JAXDIST_LINKS", str(path))
    with pytest.raises(ConfigError, match=message):
        cost.links_of(jaxdist.MirroredStrategy().layout)


def test_what_is_no_path_and_no_link_is_refused() -> None:
    for given_ in (3, [3], [cost.TABLE["pcie-4"], "pcie-3"]):
        with pytest.raises(ArgumentTypeError, match=r"jaxdist\.config\.links was given"):
            jaxdist.config.links(given_)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be read"):
        jaxdist.config.links("/no/such/file.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        cost.save_links("/no/such/folder/links.json", [])


def test_sizes_at_which_the_order_changes_are_where_the_times_cross() -> None:
    links = cost.Links(cost.TABLE["ethernet-10"])
    for (a, b), n in itertools.product([("psgpu", "xring")], (4, 8)):
        small, large = (cost.cheapest(n, s, links, algorithms=(a, b))[0][0] for s in (8, 10**9))
        assert (small, large) == (a, b)
