"""Names of GPUs: what they mean, and what is refused."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist import _gpus, cost, errors
from jaxdist._called import call_as
from jaxdist._planning import gpus

GPUS = [name for name, chip in cost.CHIPS.items() if chip.platform == "gpu"]


@given(st.sampled_from(GPUS), st.integers(1, 64), st.data())
def test_a_name_is_read_as_it_is_written(gpu: str, domains: int, data: st.DataObject) -> None:
    most_hosts, most_gpus = cost.CHIPS[gpu].pod
    hosts, count = data.draw(st.integers(1, most_hosts)), data.draw(st.integers(1, most_gpus))
    sizes = (domains, count) if most_hosts == 1 else (domains, hosts, count)
    name = f"{gpu}:{'x'.join(map(str, sizes))}"
    cluster = _gpus.cluster_of(name)
    assert cluster == _gpus.cluster_of(f"described:{name.upper()}")
    assert cluster.name == name
    assert cluster.num_gpus == math.prod(sizes)
    assert cluster.topology == f"{domains}x{hosts if most_hosts > 1 else 1}x{count}"
    assert _gpus.is_gpu_name(name)


@given(
    st.sampled_from(GPUS),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
)
def test_a_name_that_is_refused_suggests_one_that_is_not(gpu: str, sizes: list[int]) -> None:
    name = f"{gpu}:{'x'.join(map(str, sizes))}"
    said = _find_refusal(name)
    if said is None:
        return
    assert f"compile_for was given topology={name!r}" in said
    *_, suggested = re.findall(r"'([a-z]+\d+(?:-40)?:[\dx]+)'", said)
    found = _gpus.cluster_of(suggested)
    if 0 not in sizes and len(sizes) > 1 and math.prod(sizes) <= 60_000:
        assert found.num_gpus >= math.prod(sizes)


def _find_refusal(name: str) -> str | None:
    try:
        call_as("compile_for", _gpus.cluster_of, name)
    except errors.TopologyError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h100:4", "'h100' was understood, and the sizes '4' were not"),
        ("h100:4x9", "with 9 GPUs of a host"),
        ("gb200:2x19x4", "with 19 hosts of an NVLink domain"),
        ("gb200:2x18", "gb200:NVLink domains x hosts x GPUs of a host"),
        ("h100", "there are no sizes"),
        ("h100:axb", "the sizes 'axb' were not"),
        ("h1000:4x8", "The nearest is 'h100'"),
        ("h100:9000x8", "which is 72,000 GPUs"),
        ("h100:4x8*2", "the sizes '4x8*2' were not"),
    ],
)
def test_a_wrong_name_says_what_was_understood(name: str, said: str) -> None:
    with pytest.raises(errors.TopologyError, match=re.escape(said)):
        _gpus.cluster_of(name)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(errors.ArgumentTypeError, match="topology is a name of GPUs"):
        _gpus.cluster_of(7)


@pytest.mark.parametrize("name", ["v5e:4x4", "v4:2x2x1", "tpu7x:2x2x1", "local", "", None, 3])
def test_names_of_tpus_and_other_values_are_no_names_of_gpus(name: object) -> None:
    assert not _gpus.is_gpu_name(name)


@pytest.mark.parametrize("name", GPUS)
def test_a_row_has_the_figures_of_its_links_and_of_its_target(name: str) -> None:
    chip = cost.CHIPS[name]
    assert chip.target is not None
    assert cost.chip_of(chip.target.kind) == chip
    assert cost.generation_of(chip.target.kind) == name
    assert chip.hbm_bytes == chip.target.memory_bytes
    assert chip.flops_of("bf16") == chip.flops == 2 * chip.flops_of("f32")
    text = chip.target.to_text()
    assert f"device_memory_size: {chip.hbm_bytes} " in text
    assert text.count("{") == text.count("}")
    assert chip.source
    assert chip.inner_source
    assert chip.outer_source


@pytest.mark.parametrize(
    "kind", ["NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB"]
)
def test_a_gpu_with_other_peaks_is_not_taken_for_a_row(kind: str) -> None:
    assert cost.generation_of(kind) is None


@pytest.mark.parametrize(("name", "size"), [("h100:4x8", 2), ("gb200:2x18x4", 8)])
def test_places_are_hosts_and_domains(name: str, size: int) -> None:
    cluster = _gpus.cluster_of(name)
    places = gpus._make_places(cluster, size)
    assert places.num_chips == cluster.num_gpus
    assert (places.num_replicas, places.num_logical) == (cluster.num_gpus // size, size)
    flat = places.coordinates.reshape(-1, 4)
    assert len({tuple(place) for place in flat.tolist()}) == cluster.num_gpus
    # The GPU of a host counts fastest, as in JAX's order of devices.
    assert flat[: cluster.gpus, 0].tolist() == list(range(cluster.gpus))
    assert (flat[: cluster.gpus, 1:] == 0).all()
