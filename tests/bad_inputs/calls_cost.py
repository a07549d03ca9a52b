"""Valid calls of what a collective costs."""

import tempfile
from pathlib import Path

import jax

from jaxdist import cost
from tests.bad_inputs.call import Call, strategy

_LINK = cost.TABLE["nvlink-4"]
_SAMPLES = [cost.Sample(c, b, 1e-4 + c * (2e-6 + b / 1e9)) for c in (1, 9) for b in (8, 8000)]
_NUMBERS = {"alpha": 1e-6, "bytes_per_second": 1e9, "memory_bytes_per_second": 1e10}

_TARGET = cost.CHIPS["h100"].target or cost.Target("", (9, 0), False, 0, 0, 0, 0, 0, 0.0, 0, 0.0)


def _file() -> Path:
    path = Path(tempfile.mkdtemp(), "links.json")
    cost.save_links(path, [cost.TABLE["cpu-threads"]])
    return path


CALLS = {
    "jaxdist.cost.Chip.per_device": Call(
        lambda: cost.CHIPS["v4"].per_device, lambda: {"devices": 2}
    ),
    "jaxdist.cost.Chip.flops_of": Call(
        lambda: cost.CHIPS["h100"].flops_of, lambda: {"dtype": "bf16"}
    ),
    "jaxdist.cost.Target.to_text": Call(lambda: _TARGET.to_text, lambda: {"cuda": 12}),
    "jaxdist.cost.efficiency_of": Call(
        lambda: cost.efficiency_of, lambda: {"chip": cost.CHIPS["h100"]}
    ),
    "jaxdist.cost.Link": Call(
        lambda: cost.Link, lambda: {"name": "mine", "source": "measured", **_NUMBERS}
    ),
    "jaxdist.cost.SizeCurve": Call(
        lambda: cost.SizeCurve, lambda: {"step_seconds": 5e-6, "part": 0.8, "source": "measured"}
    ),
    "jaxdist.cost.Links": Call(lambda: cost.Links, lambda: {"inner": _LINK}),
    "jaxdist.cost.Sample": Call(
        lambda: cost.Sample, lambda: {"count": 1, "num_bytes": 8, "seconds": 1e-4}
    ),
    "jaxdist.cost.chip_of": Call(
        lambda: lambda **given: cost.chip_of(**{"device": "TPU v5 lite", **given})
    ),
    "jaxdist.cost.generation_of": Call(lambda: cost.generation_of, lambda: {"kind": "TPU v4"}),
    "jaxdist.cost.devices_per_chip": Call(
        lambda: cost.devices_per_chip, lambda: {"devices": jax.devices()}
    ),
    "jaxdist.cost.exchange_factor": Call(
        lambda: cost.exchange_factor, lambda: {"devices": jax.devices()}
    ),
    "jaxdist.cost.worker_of": Call(lambda: cost.worker_of, lambda: {"device": jax.devices()[0]}),
    "jaxdist.cost.links_of": Call(lambda: cost.links_of, lambda: {"layout": strategy().layout}),
    "jaxdist.cost.for_devices": Call(
        lambda: cost.for_devices, lambda: {"link": cost.TABLE["cpu-threads"], "count": 8}
    ),
    "jaxdist.cost.load_links": Call(lambda: cost.load_links, lambda: {"path": _file()}),
    "jaxdist.cost.save_links": Call(
        lambda: cost.save_links, lambda: {"path": _file(), "measured": [_LINK]}
    ),
    "jaxdist.cost.fitted": Call(
        lambda: cost.fitted,
        lambda: {
            "known": _LINK,
            "samples": _SAMPLES,
            "num_devices": 2,
            "memory_bytes_per_second": 1e11,
            "scatter_gather": 1.0,
            "source": "measured",
        },
    ),
    "jaxdist.cost.pack_below": Call(lambda: cost.pack_below, lambda: {"link": _LINK}),
    "jaxdist.cost.seconds": Call(
        lambda: cost.seconds,
        lambda: {
            "algorithm": "xring",
            "num_replicas": 4,
            "num_bytes": 4096,
            "links": cost.Links(_LINK),
        },
    ),
    "jaxdist.cost.collective_seconds": Call(
        lambda: cost.collective_seconds,
        lambda: {"kind": "all-gather", "group_size": 4, "num_bytes": 4096, "link": _LINK},
    ),
    "jaxdist.cost.cheapest": Call(
        lambda: cost.cheapest,
        lambda: {"num_replicas": 4, "num_bytes": 4096, "links": cost.Links(_LINK)},
    ),
}
