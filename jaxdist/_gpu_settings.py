"""Recommends settings of XLA, NCCL and CUDA for GPUs, with the reason and source of each."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Mapping
from typing import Any

from jaxdist._called import called, refuse
from jaxdist._validate import as_integer, show

_GPU = re.compile(r"\d+|(GPU|MIG)-.+")
TRAININGS = ("data_parallel", "fsdp")
# The generation of each GPU; the advice depends on it.
_GENERATIONS = {
    "a100": "ampere",
    "h100": "hopper",
    "h200": "hopper",
    "b200": "blackwell",
    "gb200": "blackwell",
}
_NVLINK_4 = ("hopper", "blackwell")
_TOOLBOX = "https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext, configs/gpu/a3/llama_3.1_405b/128vm.sh"
# NVIDIA's page has this value for layers of any size.
_WHOLE_LAYER = 8 * 2**30
# MaxText has this value for 1,024 H100.
_ALL_GRADIENTS = 2**30


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting that jaxdist recommends, but never sets.

    Attributes:
        name: The environment variable, or the flag in `XLA_FLAGS`.
        value: The recommended value.
        trainings: The kinds of training that the setting is for.
        generations: The generations of GPUs that the setting is for; empty means all.
        helps: How the setting helps.
        source: The source of the recommendation.
    """

    name: str
    value: str
    trainings: tuple[str, ...]
    generations: tuple[str, ...]
    helps: str
    source: str

    @property
    def is_flag(self) -> bool:
        """Whether the setting is a flag in `XLA_FLAGS`."""
        return self.name.startswith("--")


_FOR_BOTH = (
    Setting(
        "JAX_OPTIMIZATION_LEVEL",
        "O1",
        TRAININGS,
        (),
        "collectives run beside computation: the latency-hiding scheduler, collectives of one "
        "layer beside the computation of the next, two buffers for loops; compiling takes longer",
        _TOOLBOX,
    ),
    Setting(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "0.9",
        TRAININGS,
        (),
        "JAX takes 0.75 of the memory without it; lower it to 0.8 where NCCL or cuDNN run out",
        _TOOLBOX,
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        TRAININGS,
        ("hopper",),
        "keeps the order of kernels, so that collectives start in time; slower on Blackwell",
        _TOOLBOX,
    ),
    Setting(
        "NCCL_NVLS_ENABLE",
        "1",
        TRAININGS,
        _NVLINK_4,
        "the switch of NVLink 4 adds up for all-reduces inside a host; takes some memory",
        f"{_TOOLBOX}; {_NCCL}",
    ),
    Setting(
        "--xla_gpu_enable_command_buffer",
        "FUSION,CUSTOM_CALL",
        TRAININGS,
        ("blackwell",),
        "starts kernels as CUDA graphs, which saves time of the CPU",
        _TOOLBOX,
    ),
)


def list_settings(
    training: str, generation: str, *, layer_bytes: int | None, gradient_bytes: int | None
) -> list[Setting]:
    """List the settings for a kind of training on a generation of GPUs."""
    large = "large messages use more of the bandwidth"
    of_gradients = Setting(
        "--xla_gpu_all_reduce_combine_threshold_bytes",
        str(gradient_bytes or _ALL_GRADIENTS),
        ("data_parallel",),
        (),
        f"{large}, and small ones start earlier: try 16 MB up to all gradients, in steps of 2; "
        "a strategy with bytes_per_pack sets its own value",
        f"{_TOOLBOX}; {_MAXTEXT}",
    )
    of_layers = [
        Setting(
            f"--xla_gpu_{kind}_combine_threshold_bytes",
            str(layer_bytes or _WHOLE_LAYER),
            ("fsdp",),
            (),
            f"{large}: at least the {what} of one layer",
            _TOOLBOX,
        )
        for kind, what in (("all_gather", "parameters"), ("reduce_scatter", "gradients"))
    ]
    return [
        setting
        for setting in (*_FOR_BOTH, of_gradients, *of_layers)
        if training in setting.trainings
        and (not setting.generations or generation in setting.generations)
    ]


class GpuFlags(dict[str, str]):
    """Environment variables for a training on GPUs, with the reason for each setting.

    A dict from the names of environment variables to their values. `XLA_FLAGS` has all flags.

    Args:
        settings: The settings.

    Attributes:
        settings: The settings, each with its reason and source.
    """

    def __init__(self, settings: list[Setting]) -> None:
        variables = {s.name: s.value for s in settings if not s.is_flag}
        flags = " ".join(f"{s.name}={s.value}" for s in settings if s.is_flag)
        super().__init__({**variables, **({"XLA_FLAGS": flags} if flags else {})})
        self.settings = tuple(settings)

    def to_shell(self) -> str:
        """Return lines for a shell, which add flags to those already in `XLA_FLAGS`."""
        lines = [
            f'export {name}="${{{name}:-}} {value}"'
            if name == "XLA_FLAGS"
            else f"export {name}={shlex.quote(value)}"
            for name, value in self.items()
        ]
        return "\n".join(lines)

    def explain(self) -> str:
        """Return each setting with its reason and source."""
        parts = [f"{s.name}={s.value}\n    {s.helps}\n    {s.source}" for s in self.settings]
        return "\n".join(parts)


@called("config.gpu_flags")
def gpu_flags(
    training: str,
    *,
    chip: str = "h100",
    layer_bytes: int | None = None,
    gradient_bytes: int | None = None,
) -> GpuFlags:
    """Return the settings of XLA and NCCL that are recommended for training on NVIDIA GPUs.

    This function sets nothing. XLA, NCCL and CUDA read these variables when a process starts them,
    so set them before: in the shell, or in `os.environ` before the first line that uses JAX. They
    have no effect on CPUs and TPUs, where XLA ignores the flags.

    Args:
        training: `"data_parallel"`, where gradients are all-reduced, or `"fsdp"`, where
            parameters are all-gathered and gradients are reduce-scattered.
        chip: `"a100"`, `"h100"`, `"h200"`, `"b200"` or `"gb200"`.
        layer_bytes: The bytes of the parameters of the largest layer, for `"fsdp"`: collectives
            of up to this many bytes in total become one. The default is 8 GiB, as on NVIDIA's page.
        gradient_bytes: The same for the all-reduces of `"data_parallel"`; at most the bytes of all
            gradients. The default is 1 GiB, as in MaxText for 1,024 H100.

    Returns:
        A dict for `os.environ.update`. `to_shell()` gives lines for a shell, and `explain()` gives
        the reason and the source of each setting.

    Raises:
        ArgumentError: An unknown training or chip, or bytes for the other kind of training or
            below 1.
        ArgumentTypeError: Bytes that are not an integer.

    Cost:
        None.

    Example:
        >>> flags = jaxdist.config.gpu_flags("fsdp", chip="h100", layer_bytes=436_000_000)
        >>> print(flags.to_shell())
        export JAX_OPTIMIZATION_LEVEL=O1
        export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
        export CUDA_DEVICE_MAX_CONNECTIONS=1
        export NCCL_NVLS_ENABLE=1
        export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_all_gather_combine_threshold_bytes=436000000 \
--xla_gpu_reduce_scatter_combine_threshold_bytes=436000000"

    Source:
        NVIDIA's "Tips for High-Performance LLMs with JAX and XLA"; MaxText's scripts for H100.
    """
    if not isinstance(training, str) or training not in TRAININGS:
        raise refuse(
            f"training={show(training)}.",
            f"Kinds of training are {', '.join(map(repr, TRAININGS))}.",
            "Pass 'data_parallel' if each GPU has all parameters, and 'fsdp' if they are divided.",
        )
    for name, given, other in (
        ("layer_bytes", layer_bytes, "data_parallel"),
        ("gradient_bytes", gradient_bytes, "fsdp"),
    ):
        if given is not None and training == other:
            raise refuse(
                f"training={training!r} and {name}={given!r}.",
                "layer_bytes is for 'fsdp', and gradient_bytes for 'data_parallel'.",
                f"Remove {name}, or pass the other kind of training.",
            )
    return GpuFlags(
        list_settings(
            training,
            find_generation(chip),
            layer_bytes=_as_bytes("layer_bytes", layer_bytes),
            gradient_bytes=_as_bytes("gradient_bytes", gradient_bytes),
        )
    )


def find_generation(chip: Any) -> str:
    """Return the generation of a GPU.

    Raises:
        ArgumentError: The GPU is unknown.
    """
    if not isinstance(chip, str) or chip not in _GENERATIONS:
        raise refuse(
            f"chip={show(chip)}.",
            f"Settings are known for {', '.join(_GENERATIONS)}.",
            "Pass the one of the same generation as your GPU: a100 for Ampere, h100 for Hopper, "
            "b200 for Blackwell.",
        )
    return _GENERATIONS[chip]


def generation_of_kind(device_kind: str) -> str | None:
    """Return the generation of a JAX `device_kind`, such as "NVIDIA H100 80GB HBM3"; or None."""
    words = device_kind.lower().replace("-", " ").split()
    return next((g for chip, g in _GENERATIONS.items() if chip in words), None)


def _as_bytes(name: str, given: Any) -> int | None:
    return None if given is None else as_integer(name, given, least=1)


def list_visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs in `CUDA_VISIBLE_DEVICES`; None if the variable is not set.

    CUDA ignores an entry that names no GPU, such as -1 or NoDevFiles, and everything after it.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return list(itertools.takewhile(_GPU.fullmatch, map(str.strip, visible.split(","))))
