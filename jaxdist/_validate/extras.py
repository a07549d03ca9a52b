"""Optional packages: the purpose of each, whether it is installed, and how to install it."""

import dataclasses
import importlib.metadata
import importlib.util
import sys

from jaxdist._called import called, refuse
from jaxdist._validate.arguments import check_text
from jaxdist.errors import MissingExtraError


@dataclasses.dataclass(frozen=True)
class Extra:
    """One optional package.

    Attributes:
        name: The name of the extra in pyproject.toml, and of the package on PyPI.
        module: The module that is imported.
        adds: A phrase for the features that the package adds.
        others: Further packages of the extra, each with the module that is imported.
        requirements: The requirements, if they depend on the version of Python.
        command: The command that installs the requirements for this version of Python.
    """

    name: str
    module: str
    adds: str
    others: tuple[tuple[str, str], ...] = ()
    requirements: tuple[str, ...] = ()
    command: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether all modules of the extra are found. They are not imported."""
        # An import would be slow (matplotlib, libtpu). `find_spec` raises ValueError for a module
        # in `sys.modules` without a spec.
        try:
            modules = (self.module, *(module for _, module in self.others))
            return all(importlib.util.find_spec(m) is not None for m in modules)
        except (ImportError, ValueError):
            return False

    @property
    def version(self) -> str | None:
        """The installed version; None if the package is missing or has no version."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def install_command(self) -> str:
        """The command that installs the package."""
        # Name the packages, not an extra of jaxdist, which is not published.
        return self.command or f"pip install {' '.join(self.packages)}"

    @property
    def packages(self) -> list[str]:
        """All packages of the extra."""
        if self.requirements:
            return list(self.requirements)
        return [self.name, *(package for package, _ in self.others)]


# JAX has CUDA 12 for Python up to 3.11, and CUDA 13 from 3.12 on: a plugin, and the compiler.
_CUDA = (
    ("jax[cuda12-local]", "nvidia-cuda-nvcc-cu12")
    if sys.version_info < (3, 12)
    else ("jax[cuda13-local]", "nvidia-cuda-nvcc")
)


def cuda_plan_command(version: str = "") -> str:
    """Return the command that installs the packages for plans of GPUs, for this Python.

    Args:
        version: The version of JAX; "" lets pip choose.
    """
    jax_package, compiler = _CUDA
    wanted = f"=={version}" if version else ""
    return f'pip install "{jax_package}{wanted}" {compiler}'


EXTRAS = (
    Extra("grain", "grain", "input pipelines with shuffling and saved positions"),
    Extra(
        "grpcio",
        "grpc",
        "parameter servers and remote calls between processes",
        (
            ("grpcio-health-checking", "grpc_health"),
            ("flatbuffers", "flatbuffers"),
            ("zlib-ng", "zlib_ng"),
        ),
    ),
    Extra("libtpu", "libtpu", "planning for TPU pods, on a machine without one"),
    Extra(
        "cuda-plan",
        "jax_plugins.xla_cuda12" if sys.version_info < (3, 12) else "jax_plugins.xla_cuda13",
        "planning for GPUs, on a machine without one",
        requirements=(
            "jax[cuda12-local]; python_version < '3.12'",
            "nvidia-cuda-nvcc-cu12; python_version < '3.12'",
            "jax[cuda13-local]; python_version >= '3.12'",
            "nvidia-cuda-nvcc; python_version >= '3.12'",
        ),
        command=cuda_plan_command(),
    ),
    Extra("tensorboardX", "tensorboardX", "logs for TensorBoard"),
    Extra("scikit-learn", "sklearn", "the handwritten digits of `jaxdist train`"),
    Extra("matplotlib", "matplotlib", "pictures of learning curves"),
    Extra("kubernetes", "kubernetes", "addresses of pods, listed by labels"),
    Extra(
        "google-api-python-client",
        "googleapiclient",
        "addresses of an instance group of Compute Engine",
    ),
    Extra("cloudpickle", "cloudpickle", "`testing.launch` of functions of a notebook"),
    Extra("ray", "ray", "`jaxdist launch --on ray`"),
    Extra("keras", "keras", "compile, fit, evaluate and predict of Keras models"),
)


@called("training.require_extra")
def require_extra(name: str, purpose: str) -> None:
    """Check that an optional package is installed.

    Args:
        name: One of `EXTRAS`.
        purpose: The reason, which completes the sentence "is needed to ...".

    Raises:
        MissingExtraError: The package is not installed. The message has the command to install it.
        ArgumentError: No extra has this name.

    Example:
        >>> require_extra("scikit-learn", "load the digits")
    """
    check_text("name", name, EXTRAS[0].name)
    check_text("purpose", purpose, "read the digits")
    extra = next((e for e in EXTRAS if e.name == name), None)
    if extra is None:
        raise refuse(
            f"name={name!r}, which is not an extra.",
            f"The extras are {[e.name for e in EXTRAS]}.",
            "Pass one of these.",
        )
    if not extra.is_installed:
        raise MissingExtraError(
            f"{extra.name} is needed to {purpose}, and it is not installed.\n\n"
            "jaxdist is installed without its optional packages.\n\n"
            f"Install it with: {extra.install_command}"
        )
