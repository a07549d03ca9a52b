"""Names of GPUs that are read, and what is suggested for names that are not."""

import jax
import pytest

import jaxdist
from jaxdist import _gpus
from jaxdist._called import call_as
from jaxdist.errors import ArgumentTypeError, DeviceError, TopologyError


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("h100:4x8", ("h100", 4, 1, 8)),
        (" H100:4X8 ", ("h100", 4, 1, 8)),
        ("described:a100-80:1x2", ("a100", 1, 1, 2)),
        ("A100-40GB:1x8", ("a100-40", 1, 1, 8)),
        ("gb200:2x18x4", ("gb200", 2, 18, 4)),
    ],
)
def test_a_name_is_read(name: str, sizes: tuple[str, int, int, int]) -> None:
    cluster = _gpus.cluster_of(name)
    assert (cluster.gpu, cluster.domains, cluster.hosts, cluster.gpus) == sizes
    assert _gpus.is_gpu_name(name)
    assert _gpus.cluster_of(cluster.name) == cluster


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("h100", "h100:4x8"),
        ("h100:4", "h100:1x4"),
        ("h100:4x9", "h100:5x8"),
        ("h100:0x8", "h100:1x8"),
        ("h100:4x8*2", "h100:8x8"),
        ("h100:4 x 8", "h100:4x8"),
        ("h100:4.5x8", "h100:4x8"),
        ("h100:1x1x1", "h100:1x1"),
        ("h100:" + "9" * 5000 + "x8", "h100:4x8"),
        ("h100:100000x8", "h100:8192x8"),
        ("h100x8", "h100:4x8"),
        ("h800:1x8", "h200:1x8"),
        ("nvidia:h100:1x8", "h100:1x8"),
        ("virtual:h100:1x8", "h100:1x8"),
        ("mi300:1x8", "h100:1x8"),
        ("gpu:1x8", "h100:1x8"),
        ("gb200:2x18", "gb200:2x18x4"),
        ("gb200:1x19x4", "gb200:2x18x4"),
        ("gb200:99999x18x4", "gb200:910x18x4"),
        ("described:h100:1x16", "described:h100:2x8"),
    ],
)
def test_what_was_probably_meant_is_suggested_and_is_a_name(name: str, suggested: str) -> None:
    assert _gpus.is_gpu_name(name)
    with pytest.raises(TopologyError, match="compile_for was given topology=") as caught:
        call_as("compile_for", _gpus.cluster_of, name)
    assert f"'{suggested}'" in str(caught.value).split("\n\n")[2]
    assert len(str(caught.value)) < 500
    assert _gpus.cluster_of(suggested).num_gpus <= 1 << 16


@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:4x4*2", "tpu7x:2x2x1", "local", "", None, 3])
def test_what_names_no_gpu_is_left_to_tpus(name: object) -> None:
    assert not _gpus.is_gpu_name(name)


def test_a_name_that_is_no_text_is_an_error() -> None:
    with pytest.raises(ArgumentTypeError, match="of type int"):
        _gpus.cluster_of(3)


@pytest.mark.parametrize(
    "devices", ["h100:4x8", ["described:h100:4x8", "described:h100:4x8"], ["H100:1x8", "cpu:0"]]
)
def test_devices_that_need_one_description_say_how(devices: str | list[str]) -> None:
    with pytest.raises(DeviceError, match=r"Pass MirroredStrategy\('described:[hH]100:.x8'\)"):
        jaxdist.MirroredStrategy(devices)


def test_a_described_slice_of_tpus_names_the_strategy_of_tpus() -> None:
    with pytest.raises(TopologyError, match=r"TPUClusterResolver\('described:v5e:2x2'\)"):
        jaxdist.MirroredStrategy("described:v5e:2x2")


def test_shapes_of_replicas_are_for_tpus() -> None:
    strategy = jaxdist.MirroredStrategy(jax.devices("cpu")[:1])
    program = strategy.lower(lambda x: x, (jax.ShapeDtypeStruct((2,), "float32"),))
    with pytest.raises(ArgumentTypeError, match=r"logical='2x2' for h100:1x8(.|\n)*logical=8"):
        program.compile_for("h100:1x8", logical="2x2")
    with pytest.raises(TopologyError, match=r"logical=3 (.|\n)*Use one of 1, 2, 4, 8"):
        program.compile_for("h100:1x8", logical=3)
