"""What the compiler and the plugin for described GPUs say, with stand-ins for both."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback, topologies

import jaxdist
from jaxdist import _compat, errors
from jaxdist._compat import options
from jaxdist._gpus import describe
from jaxdist._program.compile.without_device import check_needs_no_device
from tests.strategies.oracle import refused


class _Lowered:
    """A program that the compiler refuses, until the products of Triton are off."""

    def __init__(self, said: str) -> None:
        self.said, self.given = said, list[dict[str, Any]]()

    def compile(self, compiler_options: dict[str, Any]) -> str:
        self.given.append(compiler_options)
        if "xla_gpu_enable_triton_gemm" not in compiler_options:
            raise jax.errors.JaxRuntimeError(self.said)
        return "compiled"


def test_a_product_without_tiles_is_compiled_without_triton() -> None:
    lowered: Any = _Lowered("INTERNAL: Couldn't find output tile sizes for dot.1")
    assert _compat.compile_for_gpu_plan(lowered, {"a": True}) == "compiled"
    assert lowered.given == [{"a": True}, {"a": True, "xla_gpu_enable_triton_gemm": False}]


def test_what_else_the_compiler_refuses_keeps_its_error() -> None:
    lowered: Any = _Lowered("RESOURCE_EXHAUSTED: planted")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: planted"):
        _compat.compile_for_gpu_plan(lowered, {})
    assert lowered.given == [{}]


def test_a_plugin_that_is_registered_and_describes_nothing_is_an_error_with_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**_: Any) -> None:
        raise NotImplementedError("topology not implemented: planted")

    monkeypatch.setattr(_compat, "find_cuda_plugin", lambda: "xla_cuda12")
    monkeypatch.setattr(describe, "_check_plugin", lambda cluster: "xla_cuda12")
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    monkeypatch.setitem(options._bridge._topology_factories, "cuda", refuse)
    with refused(
        errors.DeviceError,
        "JAX's plugin xla_cuda12 does not describe 'h200:3x5'",
        "It reported: topology not implemented: planted",
        "Install the plugin of this JAX again",
    ):
        # A cluster that no other test describes: descriptions are kept.
        jaxdist.MirroredStrategy("described:h200:3x5")


def _print(x: Any) -> Any:
    jax.debug.print("x = {}", x)
    return x


def _call_in_a_branch(x: Any) -> Any:
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.lax.cond(x > 0, lambda: jax.pure_callback(abs, shape, x), lambda: x)


def _write(x: Any) -> Any:
    return io_callback(abs, jax.ShapeDtypeStruct((), jnp.float32), x)


@dataclasses.dataclass
class _Layout:
    is_described_gpu: bool
    described: str = "described:h100:1x8"


@pytest.mark.parametrize(
    ("step", "called"),
    [
        (_print, "jax.debug.print"),
        (_call_in_a_branch, "jax.pure_callback"),
        (_write, "jax.experimental.io_callback"),
    ],
)
def test_a_callback_is_named_with_its_line_and_what_to_do(step: Any, called: str) -> None:
    program = jax.make_jaxpr(step)(jnp.float32(1))
    layout: Any = _Layout(is_described_gpu=True)
    with refused(
        errors.DeviceError,
        "step cannot be compiled for 'described:h100:1x8'",
        f"it calls {called}",
        "test_stand_ins.py:",
        "leave the call out",
    ):
        check_needs_no_device("step", program, layout)
    other: Any = _Layout(is_described_gpu=False)
    check_needs_no_device("step", program, other)
    check_needs_no_device("step", jax.make_jaxpr(jnp.sin)(1.0), layout)
