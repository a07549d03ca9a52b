"""The optional packages: what each adds, whether it is there, how to get it."""

import dataclasses
import importlib.metadata
import importlib.util

from jaxdist._validate import check_text
from jaxdist.errors import ArgumentError, MissingExtraError


@dataclasses.dataclass(frozen=True)
class Extra:
    """One extra of the package."""

    name: str  # of the extra in pyproject.toml, and of the package on PyPI
    module: str  # as imported
    adds: str

    @property
    def is_installed(self) -> bool:
        """Whether its module can be found; it is not imported."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            return False

    @property
    def version(self) -> str | None:
        """Its installed version, None where it is missing or does not say."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def install_command(self) -> str:
        """What to type to get it: the package itself, since jaxdist is not published."""
        return f"pip install {self.name}"


EXTRAS = (
    Extra("grain", "grain", "input pipelines with shuffling and saved positions"),
    Extra("grpcio", "grpc", "parameter servers and remote calls, which are not there yet"),
    Extra("libtpu", "libtpu", "planning for TPU pods, on a machine without one"),
    Extra("scikit-learn", "sklearn", "the handwritten digits of `jaxdist train`"),
    Extra("matplotlib", "matplotlib", "pictures of learning curves"),
    Extra("keras", "keras", "compile and fit of Keras models, which are not there yet"),
)


def require_extra(name: str, purpose: str) -> None:
    """Refuse to go on without an optional package.

    Args:
        name: One of `EXTRAS`.
        purpose: What it is needed for; completes "is needed to ...".

    Raises:
        MissingExtraError: It is not installed; the message has the command that installs it.
        ArgumentError: There is no such extra.

    Example:
        >>> require_extra("scikit-learn", "load the digits")
    """
    check_text("training.require_extra", "name", name, EXTRAS[0].name)
    check_text("training.require_extra", "purpose", purpose, "read the digits")
    extra = next((e for e in EXTRAS if e.name == name), None)
    if extra is None:
        raise ArgumentError(
            f"training.require_extra was given name={name!r}, and there is no such extra.\n\n"
            f"The extras are {[e.name for e in EXTRAS]}.\n\nPass one of these."
        )
    if not extra.is_installed:
        raise MissingExtraError(
            f"{extra.name} is needed to {purpose}, and it is not installed.\n\n"
            "jaxdist is installed without its optional packages.\n\n"
            f"Install it with: {extra.install_command}"
        )
