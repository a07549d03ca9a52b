"""Saves compiled programs in files, which another process runs without compiling.

# Note [Saved programs]
A file has a line with its checksum, a line of JSON, and the executable as JAX serializes it. JAX
loads executables with pickle, so a saved program is code. The line of JSON says what the file needs
(versions of packages, devices, flags), and has a hash of the lowered program. All of it is compared
before the executable is unpickled. JAX itself checks none of it.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import logging
import pathlib
import platform
import secrets
from collections.abc import Mapping
from typing import Any

import jax
import msgspec
from jax.experimental import serialize_executable

from jaxdist import _compat
from jaxdist._called import called, refuse
from jaxdist._mesh import ReplicaMesh
from jaxdist._program.arguments.compiler_options import format_options
from jaxdist._program.compile.same_program import describe_flags
from jaxdist._validate import as_path
from jaxdist.errors import SavedProgramError, UnsupportedError

_LOG = logging.getLogger("jaxdist")
_FORMAT = b"jaxdist program 1 "
# Packages that decide which executables a process can run, by platform.
_PACKAGES = {
    "cpu": ("jax", "jaxlib"),
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"),
}
# Flags that do not change an executable. The second one sets the number of CPU devices.
_OTHER_FLAGS = ("--xla_dump_", "--xla_force_host_platform_device_count")


class _Header(msgspec.Struct, frozen=True):
    """The line of JSON."""

    name: str
    needs: dict[str, str]
    devices: list[str]
    inputs: dict[str, str]
    program: str  # a hash of the lowered program


@dataclasses.dataclass(frozen=True)
class Identity:
    """The facts that decide whether a compiled program belongs to a step.

    Args:
        name: The name of the step.
        lowered: The program before it is compiled.
        inputs: The kind, dtype and shape of each input.
        num_results: The number of results.
        layout: The layout of the strategy.
        options: All options of the compiler.
    """

    name: str
    lowered: jax.stages.Lowered
    inputs: dict[str, str]
    num_results: int
    layout: ReplicaMesh
    options: Mapping[str, Any]

    def make_header(self) -> _Header:
        """Return the header of a file with this program."""
        kind, device = self.layout.platform, self.layout.devices[0]
        needs = {name: _find_version(name) for name in _PACKAGES.get(kind, ("jax", "jaxlib"))}
        needs["platform"] = kind
        needs["device"] = str(getattr(device, "device_kind", kind))
        if kind == "cpu":
            needs["processor"] = _describe_processor()
        if kind == "gpu":
            needs["runtime"] = " ".join(device.client.platform_version.split())
        options = tuple(sorted(self.options.items()))
        needs["flags"] = describe_flags(format_options(options), without=_OTHER_FLAGS)
        text = _compat.describe_lowered(self.lowered)
        return _Header(
            self.name,
            {name: value for name, value in needs.items() if value},
            [_describe_device(device) for device in self.layout.devices],
            self.inputs,
            hashlib.sha256(text.encode()).hexdigest(),
        )


def check_path(name: str, given: Any) -> pathlib.Path:
    """Return the path of a file that will be written. It is checked before a long compilation.

    Raises:
        ArgumentError: The directory does not exist, or the path is a directory.
    """
    path = pathlib.Path(as_path(name, given, "step.program"))
    try:
        is_folder, has_folder = path.is_dir(), path.parent.is_dir()
    except OSError as error:
        raise refuse(
            f"{name}={str(path)!r}: {error}.",
            f"{name} is a file in a directory that exists.",
            "Pass another path.",
        ) from error
    if is_folder or not has_folder:
        found = str(path) if is_folder else str(path.parent)
        is_there = "is a directory" if is_folder else "is not a directory"
        raise refuse(
            f"{name}={str(path)!r}, and {found!r} {is_there}.",
            f"{name} is a file in a directory that exists.",
            "Make the directory, or pass another path.",
        )
    return path


def save_program(path: pathlib.Path, identity: Identity, executable: jax.stages.Compiled) -> None:
    """Write a compiled program; see Note [Saved programs]. An existing file is replaced as a whole.

    Raises:
        UnsupportedError: JAX cannot serialize the executable.
        SavedProgramError: The file cannot be written.
    """
    name = identity.name
    try:
        payload, _, _ = serialize_executable.serialize(executable)
    # JAX and its plugins raise several classes; nothing of the user runs here.
    except Exception as error:
        raise UnsupportedError(
            f"{name} cannot be saved: JAX {jax.__version__} cannot serialize what it compiled for "
            f"{identity.layout.platform}: {_first_line(error)}\n\n"
            "A saved program is what JAX serializes.\n\n"
            "Use the compilation cache of JAX instead: jaxdist.config.compilation_cache."
        ) from error
    rest = msgspec.json.encode(identity.make_header()) + b"\n" + payload
    # Other threads, and processes on other hosts, may save in the same folder.
    partial = path.with_name(f".program-{secrets.token_hex(8)}.partial")
    try:
        partial.write_bytes(_FORMAT + _hash(rest) + b"\n" + rest)
        partial.replace(path)
    except OSError as error:
        raise SavedProgramError(
            f"{name} cannot be saved to {str(path)!r}: {error}.\n\n"
            "jaxdist needs write access to the directory of the file.\n\nPass another path."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class SavedProgram:
    """A file of `save_program`, read and checked against damage."""

    path: pathlib.Path
    checksum: str
    header: _Header
    payload: bytes

    @classmethod
    def read(cls, path: pathlib.Path) -> "SavedProgram":
        """Read a file.

        Raises:
            SavedProgramError: The file cannot be read, is damaged, or is not a saved program.
        """
        found = f"RunOptions was given saved_program={str(path)!r}"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SavedProgramError(
                f"{found}, which cannot be read: {error}.\n\n"
                "It is a file that `jaxdist plan --save` or CompiledProgram.save wrote.\n\n"
                "Pass the path of such a file."
            ) from error
        first, _, rest = data.partition(b"\n")
        if not first.startswith(_FORMAT):
            raise SavedProgramError(
                f"{found}, which is not a saved program, or one of another version of jaxdist.\n\n"
                f"Such a file begins with {_FORMAT.decode().strip()!r}.\n\n"
                "Save it again with `jaxdist plan --save` or CompiledProgram.save."
            )
        line, _, payload = rest.partition(b"\n")
        try:
            header = msgspec.json.decode(line, type=_Header)
        except (msgspec.MsgspecError, RecursionError):
            header = None
        if header is None or _FORMAT + _hash(rest) != first:
            raise SavedProgramError(
                f"{found}, which is damaged: its checksum does not match.\n\n"
                "The file must be unchanged since it was saved.\n\nCopy or save it again."
            )
        return cls(path, first.removeprefix(_FORMAT).decode(), header, payload)

    @called(lambda identity: f"strategy.run({identity.name}): RunOptions")
    def load(self, identity: Identity, *, is_first: bool) -> jax.stages.Compiled | None:
        """Load the program instead of compiling it.

        Args:
            identity: The program that would be compiled.
            is_first: Whether the step has no program yet. A later one, such as for an uneven last
                batch or another static argument, may differ and is compiled.

        Returns:
            The program, or None if the file's program is for other inputs.

        Raises:
            SavedProgramError: The file needs other versions, devices or flags, or is for another
                step; or JAX cannot load it.
        """
        own = identity.make_header()
        self._check_needs(own)
        is_other = self.header.program != own.program
        if self.header.inputs != own.inputs or (is_other and not is_first):
            _LOG.log(
                logging.WARNING if is_first else logging.INFO,
                "strategy.run(%s): %s has the program for other inputs, so this one is compiled: "
                "%s",
                identity.name,
                self.path,
                _describe_other_inputs(self.header.inputs, own.inputs),
            )
            return None
        if is_other:
            raise refuse(
                f"saved_program={str(self.path)!r}, which holds another program: "
                f"{self.header.name} has the same inputs and other operations.",
                "A saved program replaces the compiled step, so both must be the same program.",
                "Save it again from the program as it is now, or leave saved_program out.",
                kind=SavedProgramError,
            )
        return self._unpickle(identity)

    @called("RunOptions")
    def _unpickle(self, identity: Identity) -> jax.stages.Compiled:
        num_inputs = len(jax.tree.leaves(identity.lowered.in_avals))
        devices = list(identity.layout.devices)
        try:
            loaded: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                self.payload,
                jax.tree.structure(((0,) * num_inputs, {})),
                jax.tree.structure([0] * identity.num_results),
                backend=devices[0].client,
                execution_devices=devices,
            )
        # Pickle and plugins raise any class; nothing of the user runs here.
        except Exception as error:
            raise refuse(
                f"saved_program={str(self.path)!r}, which JAX {jax.__version__} cannot load on "
                f"{identity.layout.platform}: {_first_line(error)}",
                "Versions, devices and flags are those of the file, so this is a limit of JAX or "
                "its plugin.",
                "Leave saved_program out, to compile here.",
                kind=SavedProgramError,
            ) from error
        return loaded

    @called("RunOptions")
    def _check_needs(self, own: _Header) -> None:
        """Raise if this process is not what the file was saved for."""
        there, here = self.header.needs, own.needs
        lines = [
            f"  {name}: {there.get(name, 'nothing')} in the file, {here.get(name, 'nothing')} here"
            for name in dict.fromkeys((*there, *here))
            if there.get(name) != here.get(name)
        ]
        devices, found = self.header.devices, own.devices
        if len(devices) != len(found):
            lines.append(f"  devices: {len(devices):,} in the file, {len(found):,} here")
        elif devices != found:
            first = next(n for n, (a, b) in enumerate(zip(devices, found, strict=True)) if a != b)
            lines.append(
                f"  device {first} of the mesh: {devices[first]} in the file, {found[first]} here"
            )
        if lines:
            found = f"saved_program={str(self.path)!r}, which was compiled for something else:"
            raise refuse(
                "\n".join([found, *lines]),
                "An executable runs with the versions, devices and flags that it was compiled for.",
                "Save it again for these, or leave saved_program out, to compile here.",
                kind=SavedProgramError,
            )


def read_saved(path: pathlib.Path | None) -> SavedProgram | SavedProgramError | None:
    """Return a file, or its error: in a job it is raised once all processes know of it."""
    if path is None:
        return None
    try:
        return SavedProgram.read(path)
    except SavedProgramError as error:
        return error


def describe_saved(saved: SavedProgram | SavedProgramError | None) -> str:
    """Return what other processes must have, too: the checksum of a file, or what is wrong."""
    if saved is None:
        return "none"
    return saved.checksum if isinstance(saved, SavedProgram) else _first_line(saved)


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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


def _describe_device(device: Any) -> str:
    # Only TPU programs depend on the chips' places, because of the links between chips.
    coords = getattr(device, "coords", None) if device.platform == "tpu" else None
    if coords is None:
        return str(device.id)
    core = getattr(device, "core_on_chip", 0)
    return f"{device.id} at {','.join(map(str, coords))}, core {core}"


def _describe_other_inputs(there: dict[str, str], here: dict[str, str]) -> str:
    name = next((n for n in here if there.get(n) != here[n]), "")
    if name:
        return f"{name} is {here[name]}, and {there.get(name, 'missing')} in the file"
    if len(there) != len(here):
        return f"it has {len(there)} inputs, and this has {len(here)}"
    return "a static argument or an attribute of a module differs"
