"""Compares a program with those of the other processes, before its first run.

# Note [Same program]
XLA matches the collectives of different processes by their order. If the programs differ, the
collectives of one receive the numbers of another, and a result can be wrong without an error. So
the processes compare a hash of each program, of the shapes and shardings of its inputs, and of the
flags. Only if these differ do they exchange the text, to show the first line that differs.
"""

import base64
import hashlib
import itertools
import json
import os
import zlib

import jax

from jaxdist import _compat, _processes
from jaxdist._mesh import ReplicaMesh
from jaxdist.errors import ProgramMismatchError

_CHANNEL = "program"
_MOST_BYTES_OF_TEXT = 4 * 2**20
# The compared parts and their names in the error, the most informative first.
_PARTS = {
    "function": "function",
    "inputs": "inputs",
    "mesh": "mesh",
    "flags": "flags (XLA_FLAGS, compiler options and settings of JAX)",
    "saved": "saved program (RunOptions.saved_program)",
    "program": "operations",
}
# Settings of JAX that change numbers or programs.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_disable_most_optimizations",
    "jax_enable_remat_opt_pass",
)
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def check_same_program(
    name: str,
    lowered: jax.stages.Lowered,
    inputs: dict[str, str],
    layout: ReplicaMesh,
    timeout_seconds: float | None,
    compiler_options: str,
    saved: str,
) -> None:
    """Raise if another process is about to run another program; see Note [Same program].

    For a layout that several processes share.

    Cost:
        About 0.2 ms for each leaf of the step to print the program, and one exchange over the
        key-value store.

    Args:
        name: Name and source line of the step.
        lowered: The program.
        inputs: The kind, dtype and shape of each input.
        layout: The mesh.
        timeout_seconds: How long to wait for the others; None means `collective_seconds`.
        compiler_options: The compiler options that the user passes for this step, as text.
        saved: The result of `describe_saved` for the saved program.

    Raises:
        ProgramMismatchError: The programs differ.
        DeadlineExceededError: A process did not reach a program in time.
        UnavailableError: A process has ended.
    """
    text = _compat.describe_lowered(lowered)
    described = {
        "function": name,
        "inputs": ", ".join(f"{k}: {v}" for k, v in inputs.items()),
        "mesh": f"{dict(layout.mesh.shape)}, replicas over {layout.replica_axes}",
        "flags": describe_flags(compiler_options),
        "saved": saved,
    }
    own = {k: v if len(v) < 200 else _hash(v) for k, v in described.items()} | {
        "program": _hash(text)
    }
    call = f"strategy.run({name})"
    before, purpose = f"{call} before its first run", f"the program of {call}"
    texts = _processes.exchange(before, _CHANNEL, json.dumps(own), timeout_seconds, purpose)
    reports: list[dict[str, str]] = [json.loads(text) for text in texts]
    different = [k for k in _PARTS if len({one[k] for one in reports}) > 1]
    if different:
        described["program"] = text
        raise _explain(call, described, reports, different[0], timeout_seconds)


def _explain(
    call: str,
    described: dict[str, str],
    reports: list[dict[str, str]],
    part: str,
    seconds: float | None,
) -> ProgramMismatchError:
    """Return the error for programs that differ; all processes call this together."""
    odd, usual = _processes.find_odd_ones([one[part] for one in reports])
    texts = _processes.exchange(
        call, "program-text", _pack(described[part]), seconds, f"the text of {call}"
    )
    wrong, other = _unpack(texts[odd[0]]), _unpack(texts[usual or 0])
    _processes.tell_blame(odd)
    return ProgramMismatchError(
        f"{call}: process {odd[0]} runs another program; what differs: {_PARTS[part]}.\n"
        f"{_show_first_difference(wrong, other, part)}\n\n"
        "All processes of a job run the same program on values of the same shapes.\n\n"
        "Look for code that depends on the process before this step: a condition on the process "
        "or the host, a list of files, another version of the script, or an environment variable.",
        odd,
    )


def _show_first_difference(wrong: str, other: str, part: str) -> str:
    if part != "program":
        return f"  there:     {wrong}\n  elsewhere: {other}"
    lines = itertools.zip_longest(wrong.splitlines(), other.splitlines(), fillvalue="(no line)")
    for number, (a, b) in enumerate(lines, 1):
        if a != b:
            return f"  line {number} there:     {a.strip()}\n  line {number} elsewhere: {b.strip()}"
    return "  (the first 4 MiB of both are equal)"


def describe_flags(compiler_options: str, without: tuple[str, ...] = ()) -> str:
    """Return the flags of XLA and the settings of JAX that change programs, as text.

    Args:
        compiler_options: Options of the compiler, as text.
        without: The beginnings of flags to leave out.
    """
    # Not all versions of JAX have all of them.
    settings = {name: str(getattr(jax.config, name, None)) for name in _SETTINGS}
    given = " ".join(os.environ.get(name, "") for name in _FLAG_VARIABLES)
    flags = sorted(flag for flag in given.split() if not flag.startswith(without))
    return f"{' '.join(flags)} {compiler_options} {json.dumps(settings)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _pack(text: str) -> str:
    data = text.encode()[:_MOST_BYTES_OF_TEXT]
    return base64.b64encode(zlib.compress(data)).decode()


def _unpack(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode(errors="replace")
