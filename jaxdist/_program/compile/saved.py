"""Compiled programs in files, which another process runs without compiling.

# Note [Saved programs]
A file has a line of JSON, and the executable as JAX serializes it. JAX loads executables with
pickle, so a saved program is code. All that can be compared is in the line of JSON, and is compared
before the executable is unpickled: the versions, the devices and the flags that the file needs, and
a hash of the lowered program. JAX itself checks none of them.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.compiler_options import CompilerOptions, format_options
from jaxdist._program.compile.same_program import describe_flags
from jaxdist._validate import as_path
from jaxdist.errors import ArgumentError, SavedProgramError, UnsupportedError

_LOG = logging.getLogger("jaxdist")
_FORMAT = "jaxdist program 1"
_KEYS = {"name", "needs", "devices", "inputs", "program", "bytes", "sha256"}
_MOST_BYTES_OF_HEADER = 64 * 2**20
# Packages that decide which executables a process can run, by platform.
_PACKAGES = {
    "cpu": ("jax", "jaxlib"),
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"),
}


def check_path(caller: str, name: str, given: Any) -> pathlib.Path:
    """Return the path of a file that will be written. It is checked before a long compilation.

    Raises:
        ArgumentError: There is no such directory, or the path is one.
    """
    path = pathlib.Path(as_path(caller, name, given, "step.program"))
    if not path.parent.is_dir() or path.is_dir():
        found = str(path) if path.is_dir() else str(path.parent)
        is_there = "is a directory" if path.is_dir() else "is no directory"
        raise ArgumentError(
            f"{caller} was given {name}={str(path)!r}, and {found!r} {is_there}.\n\n"
            f"{name} is a file in a directory that exists.\n\nMake the directory, or pass another "
            "path."
        )
    return path


def save_program(
    path: pathlib.Path,
    name: str,
    executable: jax.stages.Compiled,
    lowered: jax.stages.Lowered,
    inputs: dict[str, str],
    layout: ReplicaMesh,
    options: CompilerOptions,
) -> None:
    """Write a compiled program; see Note [Saved programs].

    Args:
        path: The file. An existing one is replaced as a whole.
        name: The name of the step.
        executable: What was compiled.
        lowered: What it was compiled from.
        inputs: The kind, dtype and shape of each input.
        layout: The layout of the strategy.
        options: The compiler options of the user.

    Raises:
        UnsupportedError: JAX cannot serialize the executable.
        SavedProgramError: The file cannot be written.
    """
    try:
        payload, _, _ = serialize_executable.serialize(executable)
    except (ValueError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError) as error:
        raise UnsupportedError(
            f"{name} cannot be saved: JAX {jax.__version__} cannot serialize what it compiled for "
            f"{layout.platform}: {str(error).splitlines()[0]}\n\n"
            "A saved program is what JAX serializes.\n\n"
            "Use the compilation cache of JAX instead: jaxdist.config.compilation_cache."
        ) from error
    header = {
        "format": _FORMAT,
        "name": name,
        "needs": _list_needs(layout, options),
        "devices": _list_devices(layout),
        "inputs": inputs,
        "program": _hash_program(lowered),
        "bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(json.dumps(header).encode() + b"\n" + payload)
        partial.replace(path)
    except OSError as error:
        raise SavedProgramError(
            f"{name} cannot be saved to {str(path)!r}: {error}.\n\n"
            "The file is in a directory that exists and that you may write to.\n\n"
            "Pass another path."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def load_program(
    path: pathlib.Path,
    name: str,
    lowered: jax.stages.Lowered,
    inputs: dict[str, str],
    num_results: int,
    layout: ReplicaMesh,
    options: CompilerOptions,
    *,
    is_first: bool,
) -> jax.stages.Compiled | None:
    """Load a saved program in the place of a compilation.

    Args:
        path: The file.
        name: The name of the step.
        lowered: The program that would be compiled.
        inputs: The kind, dtype and shape of each input.
        num_results: The number of results.
        layout: The layout of the strategy.
        options: The compiler options of the user.
        is_first: Whether the step has no program yet. A later one may be of an uneven last batch,
            so that other inputs are no surprise.

    Returns:
        The program, or None if the file has it for inputs of other shapes. A step with an uneven
        last batch has several programs.

    Raises:
        SavedProgramError: The file is damaged, or needs other versions, devices or flags; or it is
            of another step.
    """
    header, start = _read_header(path)
    _check_needs(path, header, layout, options)
    if header["inputs"] != inputs:
        _LOG.log(
            logging.WARNING if is_first else logging.INFO,
            "strategy.run(%s): %s has the program for other inputs, so this one is compiled: %s",
            name,
            path,
            _describe_other_inputs(header["inputs"], inputs),
        )
        return None
    if header["program"] != _hash_program(lowered):
        raise SavedProgramError(
            f"strategy.run({name}): RunOptions was given saved_program={str(path)!r}, which is of "
            f"another program: {header['name']}, with the same inputs and other operations.\n\n"
            "A saved program runs in the place of the step, so it has to be the program of this "
            "step.\n\nSave it again from the program as it is now, or leave saved_program out."
        )
    payload = _read_payload(path, start, header)
    num_inputs = len(jax.tree.leaves(lowered.in_avals))
    devices = list(layout.devices)
    try:
        loaded: jax.stages.Compiled = serialize_executable.deserialize_and_load(
            payload,
            jax.tree.structure(((0,) * num_inputs, {})),
            jax.tree.structure([0] * num_results),
            backend=devices[0].client,
            execution_devices=devices,
        )
    except (ValueError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError) as error:
        raise SavedProgramError(
            f"RunOptions was given saved_program={str(path)!r}, which JAX {jax.__version__} cannot "
            f"load on {layout.platform}: {str(error).splitlines()[0]}\n\n"
            "Versions, devices and flags are those of the file, so this is a limit of JAX or its "
            "plugin.\n\nLeave saved_program out, to compile here."
        ) from error
    return loaded


def _list_needs(layout: ReplicaMesh, options: CompilerOptions) -> dict[str, str]:
    """Return the versions, the devices and the flags that an executable needs, in words."""
    kind = layout.platform
    needs = {name: _find_version(name) for name in _PACKAGES.get(kind, ("jax", "jaxlib"))}
    needs["platform"] = kind
    needs["device"] = str(getattr(layout.devices[0], "device_kind", kind))
    if kind == "cpu":
        needs["processor"] = _describe_processor()
    needs["flags"] = describe_flags(format_options(options))
    return {name: value for name, value in needs.items() if value}


def _find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _describe_processor() -> str:
    """Return the architecture, and a hash of the instructions that the processor has."""
    # XLA compiles for the instructions of this machine, and another one may lack some.
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    words = " ".join(sorted(flags.partition(":")[2].split()))
    return f"{platform.machine()} {hashlib.sha256(words.encode()).hexdigest()[:12]}"


def _list_devices(layout: ReplicaMesh) -> list[str]:
    """Return each device in the order of the mesh, with its place in the slice."""
    return [_describe_device(device) for device in layout.devices]


def _describe_device(device: Any) -> str:
    # Only the links between TPUs make a program one of certain places.
    coords = getattr(device, "coords", None) if device.platform == "tpu" else None
    if coords is None:
        return str(device.id)
    core = getattr(device, "core_on_chip", 0)
    return f"{device.id} at {','.join(map(str, coords))}, core {core}"


def _hash_program(lowered: jax.stages.Lowered) -> str:
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def _read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    """Return the header, and where the executable begins."""
    start = 0
    try:
        with path.open("rb") as file:
            line = file.readline(_MOST_BYTES_OF_HEADER)
            start = file.tell()
        header = json.loads(line)
    except OSError as error:
        raise SavedProgramError(
            f"RunOptions was given saved_program={str(path)!r}, which cannot be read: {error}.\n\n"
            "It is a file that `jaxdist plan --save` or CompiledProgram.save wrote.\n\n"
            "Pass the path of such a file."
        ) from error
    except ValueError:
        header = None
    is_dict = isinstance(header, dict) and header.get("format") == _FORMAT
    if not is_dict or not _KEYS <= {*header}:
        raise SavedProgramError(
            f"RunOptions was given saved_program={str(path)!r}, which is no saved program of this "
            "version of jaxdist.\n\n"
            f"Such a file begins with {_FORMAT!r}.\n\n"
            "Save it again with `jaxdist plan --save` or CompiledProgram.save."
        )
    return header, start


def _read_payload(path: pathlib.Path, start: int, header: dict[str, Any]) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        payload = file.read()
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise SavedProgramError(
            f"RunOptions was given saved_program={str(path)!r}, which is damaged: it has "
            f"{len(payload):,} bytes of a program of {header['bytes']:,}, or others.\n\n"
            "The file is read as it was written.\n\nCopy or save it again."
        )
    return payload


def _check_needs(
    path: pathlib.Path, header: dict[str, Any], layout: ReplicaMesh, options: CompilerOptions
) -> None:
    """Raise if this process is not what the file was saved for."""
    there, here = header["needs"], _list_needs(layout, options)
    lines = [
        f"  {name}: {there.get(name, 'none')} in the file, {here.get(name, 'none')} here"
        for name in dict.fromkeys((*there, *here))
        if there.get(name) != here.get(name)
    ]
    devices, own = header["devices"], _list_devices(layout)
    if len(devices) != len(own):
        lines.append(f"  devices: {len(devices):,} in the file, {len(own):,} here")
    elif devices != own:
        first = next(n for n, (a, b) in enumerate(zip(devices, own, strict=True)) if a != b)
        lines.append(
            f"  device {first} of the mesh: {devices[first]} in the file, {own[first]} here"
        )
    if lines:
        raise SavedProgramError(
            f"RunOptions was given saved_program={str(path)!r}, which was compiled for something "
            "else:\n"
            + "\n".join(lines)
            + "\n\nAn executable runs with the versions, devices and flags that it was compiled "
            "for.\n\nSave it again for these, or leave saved_program out, to compile here."
        )


def _describe_other_inputs(there: dict[str, str], here: dict[str, str]) -> str:
    name = next((n for n in here if there.get(n) != here[n]), "")
    if not name:
        return f"it has {len(there)} inputs, and this has {len(here)}"
    return f"{name} is {here[name]}, and {there.get(name, 'not there')} in the file"
