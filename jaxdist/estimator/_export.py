"""An exported model: a StableHLO program, and a checkpoint of its weights."""

import json
import shutil
import time
import uuid
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist._buckets import BucketPath, Place, as_place
from jaxdist._called import called, name_call, refuse, refuse_type
from jaxdist._checkpoints import Checkpoints
from jaxdist._validate import is_array, show
from jaxdist.errors import BucketError, CheckpointError
from jaxdist.estimator._model.building import Built
from jaxdist.training import require_extra

_PROGRAM, _WEIGHTS, _ABOUT = "predict.bin", "weights", "export.json"
_TAKEN, _PARTIAL = "export.begun", ".partial"  # in a bucket; on a file system

# Note [Complete or absent exports]
# On a file system an export is written into a folder with another name, which is renamed. A bucket
# has no rename: there `export.json` is written last and deleted first, and a folder without it is
# not an export. An object that is created under a condition gives each export a folder of its own.
# What a killed process has left is deleted with the exports that are older than those that are
# kept. If it is another process that still writes, its export would be deleted as well when it is
# complete; but while fewer are complete than are kept, it would not, and nothing is deleted.


def write_export(
    built: Built, features: Any, base: Place, global_step: int, *, any_batch: bool
) -> Place:
    """Write a model into a new folder of `base`, and return its path.

    See Note [Complete or absent exports].

    Args:
        built: The model for `PREDICT`, with the values of a checkpoint.
        features: Example features, for shapes and dtypes.
        base: The folder of exports.
        global_step: The step of the checkpoint.
        any_batch: Whether the program takes any number of rows, or that of `features`.
    """
    require_extra("grpcio", "write the program of a model")
    graph, state = nnx.split(built.modules)
    plain = jax.tree.map(np.asarray, nnx.to_pure_dict(state))

    def predict(weights: Any, features: Any) -> Any:
        own = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(own, weights)
        modules = nnx.merge(graph, own)
        step = lambda: jnp.int32(global_step)  # noqa: E731
        spec = built.call_model(modules, features, None, step)
        return spec.predictions if spec.export_outputs is None else spec.export_outputs

    shapes = jax.tree.map(_take_shape, features)
    if any_batch:
        (rows,) = jax.export.symbolic_shape("rows")
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype), shapes)
    weights = jax.tree.map(_take_shape, plain)
    program = bytes(jax.export.export(jax.jit(predict))(weights, shapes).serialize())
    folder = _choose_folder(base)
    if isinstance(folder, BucketPath):
        _write(folder, global_step, plain, program, _describe(global_step, shapes, weights))
        return folder
    partial = folder.with_name(f"{folder.name}{_PARTIAL}")
    partial.mkdir(parents=True)
    _write(partial, global_step, plain, program, _describe(global_step, shapes, weights))
    partial.rename(folder)
    return folder


def _describe(global_step: int, shapes: Any, weights: Any) -> bytes:
    about = {
        "global_step": global_step,
        "features": str(shapes),
        "weights": jax.tree.map(lambda s: [str(s.dtype), list(s.shape)], weights),
    }
    return json.dumps(about, indent=1).encode()


def _write(folder: Place, step: int, weights: Any, program: bytes, about: bytes) -> None:
    with Checkpoints(folder / _WEIGHTS) as checkpoints:
        checkpoints.save(step, {"weights": weights})
    (folder / _PROGRAM).write_bytes(program)
    (folder / _ABOUT).write_bytes(about)


def _take_shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _choose_folder(base: Place) -> Place:
    """Return the path of a new export: the time in seconds, as in TensorFlow."""
    number = max([int(time.time()), *(n + 1 for n in _list_numbers(base))])
    if isinstance(base, BucketPath):
        # The listing may be late. Equal contents would be taken for the same request.
        while not (base / str(number) / _TAKEN).create(uuid.uuid4().bytes):
            number += 1
    return base / str(number)


def _list_numbers(base: Place, *, complete: bool = False) -> list[int]:
    """Return the names of exports in order, of all or of the complete ones."""
    if isinstance(base, BucketPath):
        ending = f"/{_ABOUT}" if complete else ""
        found = base.list_names()
        names = {name.partition("/")[0] for name in found if name.endswith(ending)}
    else:
        ending = "" if complete else _PARTIAL
        names = {path.name.removesuffix(ending) for path in base.glob("*")}
    return sorted(int(name) for name in names if name.isdecimal())


def delete_old(base: Place, keep: int | None) -> None:
    """Delete all exports but the newest ones, and incomplete ones that are older than these.

    See Note [Complete or absent exports].
    """
    complete = _list_numbers(base, complete=True)
    if keep is None or len(complete) < keep:
        return
    for number in _list_numbers(base):
        if number >= complete[-keep]:
            break
        folder = base / str(number)
        if isinstance(folder, BucketPath):
            (folder / _ABOUT).unlink()
            folder.rmtree()
        else:
            for path in folder, folder.with_name(f"{number}{_PARTIAL}"):
                shutil.rmtree(path, ignore_errors=True)


class Exported:
    """An exported model: call it with features.

    Attributes:
        global_step: The step of the checkpoint that was exported.

    Example:
        >>> import tempfile
        >>> def model_fn(features, labels, mode):
        ...     model = jaxdist.estimator.get_module(lambda rngs: nnx.Linear(2, 1, rngs=rngs))
        ...     loss = None if labels is None else jnp.mean((model(features) - labels) ** 2)
        ...     return jaxdist.estimator.EstimatorSpec(
        ...         mode, predictions=model(features), loss=loss, train_op=optax.sgd(0.1))
        >>> estimator = jaxdist.estimator.Estimator(model_fn, tempfile.mkdtemp())
        >>> x = np.ones((4, 2), "float32")
        >>> estimator = estimator.train(lambda: [(x, x[:, :1])])
        >>> path = estimator.export(tempfile.mkdtemp(), x)
        >>> jaxdist.estimator.load_export(path)(x[:3]).shape
        (3, 1)
    """

    def __init__(self, program: Any, weights: Any, global_step: int) -> None:
        self._program, self._weights, self.global_step = program, weights, global_step

    def __call__(self, features: Any) -> Any:
        """Return the predictions of a batch.

        Args:
            features: Arrays of the shapes and dtypes of the export.
        """
        return self._program.call(self._weights, features)


@called("estimator.load_export")
def load_export(path: Any) -> Exported:
    """Return an exported model, without the model function or Flax modules.

    Args:
        path: The path that `Estimator.export` returned.

    Raises:
        CheckpointError: There is no export at the path, or it is damaged.
        BucketError: The bucket cannot be read.

    Example:
        See `Exported`.
    """
    folder = as_place("path", path, "runs/a/export/best/1767000000")
    try:
        about = json.loads((folder / _ABOUT).read_bytes())
        program = (folder / _PROGRAM).read_bytes()
        like = jax.tree.map(
            lambda entry: jax.ShapeDtypeStruct(tuple(entry[1]), jnp.dtype(entry[0])),
            about["weights"],
            is_leaf=lambda x: isinstance(x, list),
        )
        step = int(about["global_step"])
    except BucketError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{name_call()} found no export in {folder}: {type(error).__name__}: {error}.\n\n"
            "An export is a folder that Estimator.export, or an exporter, has written.\n\n"
            "Pass the path that Estimator.export returns."
        ) from None
    require_extra("grpcio", "read the program of a model")
    with Checkpoints(folder / _WEIGHTS) as checkpoints:
        weights = checkpoints.restore(step, like={"weights": like}).state["weights"]
    return Exported(jax.export.deserialize(bytearray(program)), weights, step)


def check_features(features: Any, *, any_batch: bool) -> None:
    """Check example features of an export.

    Raises:
        ArgumentTypeError: A leaf has no shape and dtype.
        ArgumentError: There are no leaves, or a leaf has no rows.
    """
    leaves = jax.tree.leaves(features)
    for leaf in leaves:
        if not (is_array(leaf) and hasattr(leaf, "dtype")):
            raise refuse_type(
                f"features with {show(leaf)}.",
                "Example features are arrays, or jax.ShapeDtypeStructs.",
                "Pass for instance np.zeros((1, 4), 'float32').",
            )
    if not leaves or (any_batch and not all(leaf.shape for leaf in leaves)):
        raise refuse(
            f"features={show(features)}.",
            "Example features are arrays [b, ...], like those that model_fn gets.",
            "Pass for instance np.zeros((1, 4), 'float32').",
        )
