"""What a description of GPUs needs to be installed, and what is said if it is not."""

import importlib.metadata
from typing import Any

import jax
import pytest

import jaxdist
from jaxdist import _compat, errors
from jaxdist._gpus import describe

# A cluster that no other test describes: descriptions are kept.
NAME = "described:h200:3x7"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which the plugin of this JAX, and ptxas, seem to be installed."""
    version = importlib.metadata.version

    def find_version(package: str) -> str:
        return jax.__version__ if package == "jax-cuda12-plugin" else version(package)

    monkeypatch.setattr(_compat, "find_cuda_plugin", lambda: "xla_cuda12")
    monkeypatch.setattr(importlib.metadata, "version", find_version)
    monkeypatch.setattr(describe, "_has_ptxas", lambda: True)
    return monkeypatch


def test_a_missing_plugin_is_named_with_the_command_for_this_python(
    installed: pytest.MonkeyPatch,
) -> None:
    installed.setattr(_compat, "find_cuda_plugin", lambda: None)
    with pytest.raises(errors.MissingExtraError) as caught:
        jaxdist.MirroredStrategy(NAME)
    assert "JAX's CUDA plugin is not installed" in str(caught.value)
    assert describe.cuda_plan_command() in str(caught.value)


def test_a_missing_ptxas_is_named_with_the_command(installed: pytest.MonkeyPatch) -> None:
    installed.setattr(describe, "_has_ptxas", lambda: False)
    with pytest.raises(errors.MissingExtraError, match="the assembler ptxas is not installed"):
        jaxdist.MirroredStrategy(NAME)


def test_a_plugin_of_another_version_than_jax_is_named_with_both(
    installed: pytest.MonkeyPatch,
) -> None:
    installed.setattr(importlib.metadata, "version", lambda package: "0.1.2")
    with pytest.raises(errors.DeviceError) as caught:
        jaxdist.MirroredStrategy(NAME)
    said = str(caught.value)
    assert f"jax-cuda12-plugin is 0.1.2, and JAX is {jax.__version__}" in said
    assert f"]=={jax.__version__}" in said


def test_what_the_plugin_refuses_is_an_error_with_its_words(
    installed: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("INTERNAL: planted")

    installed.setattr(_compat, "make_gpu_devices", refuse)
    with pytest.raises(errors.DeviceError, match="It reported: INTERNAL: planted"):
        jaxdist.MirroredStrategy(NAME)


def test_a_plugin_that_was_built_from_source_has_no_version(
    installed: pytest.MonkeyPatch,
) -> None:
    def find_none(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    installed.setattr(importlib.metadata, "version", find_none)
    installed.setattr(describe, "_has_ptxas", lambda: False)
    # The version is no obstacle, so ptxas is the next one.
    with pytest.raises(errors.MissingExtraError, match="ptxas"):
        jaxdist.MirroredStrategy(NAME)
