"""Every documented name of `tf.distribute` is found, with its spelling in jaxdist."""

import re

import pytest

from tests import tf_names
from tests.lint.command import Finding, lint_text, lint_texts

_LINES = re.sub(r"\n +", " ", tf_names.HERE).splitlines()
NAMES = sorted({line.partition("(")[0] for line in _LINES if line})
# Where TensorFlow has what is not below tf.distribute; errors and operations are looked for by
# their tf.distribute neighbours only.
_PLACES = {
    "compat.v1.tpu": "tf.compat.v1.tpu",
    "compat.v1": "tf.compat.v1.distribute",
    "contrib": "tf.contrib.distribute",
    "tpu": "tf.tpu",
    "nn": "tf.nn",
    "config": "tf.config",
    "estimator": "tf.estimator",
}
_OF_JAXDIST = ("errors.", "PerReplica", "fit", "lookup", "ExponentialMovingAverage", "Strategy.")
_OF_TF = {
    "Variable": "tf.Variable",
    "VariableSynchronization": "tf.VariableSynchronization",
    "VariableAggregation": "tf.VariableAggregation",
    "IndexedSlices": "tf.IndexedSlices",
    "function": "tf.function",
    "cluster_resolver.ClusterSpec": "tf.train.ClusterSpec",
}


def _tf_name(name: str) -> str:
    for ours, place in _OF_TF.items():
        if name == ours or name.startswith(f"{ours}."):
            return place + name[len(ours) :]
    for ours, place in _PLACES.items():
        if name == ours or name.startswith(f"{ours}."):
            return place + name[len(ours) :]
    return f"tf.distribute.{name}"


_OF_BOTH = [n for n in NAMES if not n.startswith(("errors.", "PerReplica"))]


@pytest.fixture(scope="module")
def findings() -> dict[str, list[Finding]]:
    """What is found in a program for each name that jaxdist has."""
    head = "import tensorflow as tf\ntf.distribute.Strategy\n"
    texts = [f"{head}x = [{_tf_name(name)}]\n" for name in _OF_BOTH]
    return dict(zip(_OF_BOTH, lint_texts(texts), strict=True))


@pytest.mark.parametrize("name", _OF_BOTH)
def test_a_name_that_jaxdist_has_is_found_with_its_spelling(
    name: str, findings: dict[str, list[Finding]]
) -> None:
    [_, finding] = findings[name]
    assert (finding.line, finding.column, finding.code) == (3, 6, "JD006")
    assert finding.fix == f"write jaxdist.{name}."
    assert _tf_name(name) in finding.found


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in tf_names.REPLACED
        if not name.startswith(_OF_JAXDIST) and name != "experimental_aggregate_gradients"
    ],
)
def test_a_name_that_jaxdist_does_not_have_is_found_with_what_replaces_it(name: str) -> None:
    text = f"import tensorflow as tf\n{_tf_name(name)}()\n"
    [finding] = lint_text(text)
    assert finding.line == 2
    assert tf_names.REPLACED[name] in finding.fix


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("from tensorflow import distribute\ndistribute.ReduceOp.SUM", "ReduceOp.SUM"),
        ("import tensorflow.compat.v1 as tf\ntf.distribute.get_strategy", "compat.v1.get_strategy"),
        ("import tensorflow\ntensorflow.distribute.get_strategy()", "get_strategy"),
        ("def f():\n import tensorflow as t; t.distribute.has_strategy()", "has_strategy"),
        ("\nfrom tensorflow.distribute import MirroredStrategy as M", "MirroredStrategy"),
        ("from tensorflow.distribute import experimental\nexperimental.TPUStrategy", None),
    ],
)
def test_a_name_is_found_however_it_is_imported(text: str, spelling: str | None) -> None:
    found = lint_text(text)
    assert found[-1].line == 2
    assert found[-1].fix == f"write jaxdist.{spelling or 'experimental.TPUStrategy'}."


def test_a_name_that_nobody_documents_is_found_as_well() -> None:
    [finding] = lint_text("import tensorflow as tf\ntf.distribute.NoSuchStrategy()\n")
    assert "nothing has this name in jaxdist" in finding.fix


@pytest.mark.parametrize(
    "text",
    [
        "import tensorflow as tf\ntf.data.Dataset\ntf.Variable(1)\n@tf.function\ndef f(): 0",
        "import jax as tf\ntf.distribute.MirroredStrategy()",
        "import jaxdist\njaxdist.MirroredStrategy(); jaxdist.compat.v1.get_strategy()",
        "import tensorflow as tf\n# tf.distribute.MirroredStrategy\nx = 'tf.distribute.Strategy'",
        "import torch\ntorch.distribute.MirroredStrategy()",
    ],
)
def test_other_names_are_left_alone(text: str) -> None:
    assert lint_text(text) == []
