"""JAX's C++ call path, used for compiled programs of jaxdist."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import api_util as _api_util
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import tree_util as _tree_util
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax
from jax._src.lib import xla_client as _xla_client

# Outputs, record, and whether JAX should measure the program and compile it again.
Answer = tuple[Any, Any, bool]


def answer_miss(outputs: Any, record: Any = None) -> Answer:
    """Return the answer to a miss.

    Args:
        outputs: The results of the call.
        record: A result of `fast_call_record` for later calls of this signature, or None.
    """
    return outputs, record, False


def make_dispatcher(
    name: str,
    miss: Callable[..., Answer],
    copies: Callable[[], None] | None,
) -> Callable[..., Any]:
    """Return a callable on JAX's C++ call path; `miss` handles every new signature.

    A signature is the pytree structure and, for each leaf, dtype, shape, weak type, sharding and
    whether it is committed. C++ checks everything that decides which program runs, without Python.
    `miss(*args, **kwargs)` returns a result of `answer_miss`. Under `jax.disable_jit()` every call
    is a miss. `copies()` is called for each array that has to be copied to other devices.

    Waits for a public way to dispatch one function to several compiled programs.
    """

    def shard_arg(x: Any, sharding: Any, layout: Any) -> Any:
        if copies is not None and isinstance(x, _xla_client.ArrayImpl):
            copies()
        return _pxla.cc_shard_arg(x, sharding, layout)

    def without_jit(*args: Any, **kwargs: Any) -> Any:
        return miss(*args, **kwargs)[0]

    return _jax.pjit(
        name,
        without_jit,
        miss,
        [],  # static positions
        [],  # static names
        _pxla.JitGlobalCppCacheKeys(),
        _tree_util.dispatch_registry,
        shard_arg,
    )


def fast_call_record(
    compiled: jax.stages.Compiled, num_arguments: int, outputs: Sequence[Any], template: Any
) -> Any | None:
    """Return the record with which the C++ call path runs `compiled`, or None if it cannot.

    Args:
        compiled: A compiled function of flat arguments and flat results.
        num_arguments: How many arguments it takes.
        outputs: The flat results of one call of it.
        template: The pytree of the results, with one leaf for each flat result.
    """
    # The C++ path handles neither mutable references, nor effects, nor host callbacks. Such
    # programs stay on the Python path.
    executable = compiled._executable
    if not isinstance(executable, _pxla.MeshExecutable) or executable._mut:
        return None
    call = executable.unsafe_call
    if not isinstance(call, _pxla.ExecuteReplicated):
        return None
    if call.ordered_effects or call.has_unordered_effects or call.has_host_callbacks:
        return None
    _, out_tree = _tree_util.dispatch_registry.flatten(template, None)
    if not all(isinstance(x, _xla_client.ArrayImpl) for x in outputs):
        # To C++ an array of an extended dtype (typed random keys) is a node with its raw bits.
        whole = jax.tree.unflatten(jax.tree.structure(template), outputs)
        own, _ = _tree_util.dispatch_registry.flatten(list(outputs), None)
        outputs, out_tree = _tree_util.dispatch_registry.flatten(whole, None)
        # A template may rebuild objects, such as variables, whose own arrays JAX finds.
        if list(map(id, outputs)) != list(map(id, own)):
            return None
    if not all(isinstance(x, _xla_client.ArrayImpl) for x in outputs):
        return None
    const_args = executable.shard_const_args(compiled._params.const_args)
    # C++ drops arguments that the compiled program does not use: one flag per passed argument.
    kept = [i in executable._kept_var_idx for i in range(len(const_args) + num_arguments)]
    given = zip(executable._in_shardings, executable.in_avals, strict=True)
    return _pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        out_tree,
        [_get_physical_sharding(s, a) for s, a in given],
        # Of the results: they may be on another mesh of the same devices than XLA's.
        [o.sharding for o in outputs],
        [o.aval for o in outputs],
        [o._committed for o in outputs],
        kept,
        executable._dispatch_in_layouts,
        const_args,
    )


# Before JAX 0.11 an array of numbers below one byte (int4) has another layout on the device than
# the one that compiled programs expect, and JAX rejects it.
SUPPORTS_SUB_BYTE_LAYOUTS = jax.__version_info__ >= (0, 11)


def call_without_layout_checks(
    compiled: jax.stages.Compiled, leaves: Sequence[Any]
) -> Sequence[Any]:
    """Run a compiled function of flat arguments without checking their layouts."""
    executable: Any = compiled._executable
    given = [*executable.shard_const_args(compiled._params.const_args), *leaves]
    kept = [x for i, x in enumerate(given) if i in executable._kept_var_idx]
    return executable.unsafe_call(*kept)


def _get_physical_sharding(sharding: Any, aval: Any) -> Any:
    """Return the sharding of the raw bits, which differs for typed random keys."""
    if aval is _core.abstract_token or not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return sharding
    return _pxla.sharding_impls.physical_sharding(aval, sharding)


# Waits for JAX to raise a public error when a `Compiled` program returns NaN or infinity.
InvalidNumberError = _api_util.InternalFloatingPointError


def is_checking_numbers() -> bool:
    """Whether JAX checks the results of every program for NaN or infinity."""
    return bool(_dispatch.needs_check_special())


def check_numbers(name: str, arrays: Sequence[Any]) -> None:
    """Raise an error for NaN or infinity in `arrays`, if `jax_debug_nans` or `_infs` is set."""
    if is_checking_numbers():
        _dispatch.check_special(name, arrays)
