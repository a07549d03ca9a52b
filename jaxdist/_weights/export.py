"""`export_weights`: from a model into files of safetensors."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from jaxdist._buckets import Place, as_place
from jaxdist._called import called, name_call, refuse
from jaxdist._checkpoints import agree_on_result, find_group
from jaxdist._typing import PyTree
from jaxdist._validate import as_integer, format_lines
from jaxdist._weights.files import (
    CODES,
    ENDING,
    Opened,
    ToWrite,
    open_weights,
    order_weights,
    write_weights,
)
from jaxdist._weights.leaves import ModelWeight, fetch_weight, list_weights
from jaxdist._weights.mapping import Mapped, Source, as_ignored, find_sources, is_ignored
from jaxdist._weights.matching import find_kind
from jaxdist._weights.slices import convert
from jaxdist._weights.weight import Weight, apply, list_transposes, make_unread
from jaxdist.errors import CheckpointError


@called("training.export_weights")
def export_weights(
    model: PyTree,
    path: str | Place,
    mapping: Mapped | None = None,
    *,
    like: str | Place | None = None,
    ignore: Sequence[str] = (),
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Write the weights of a model as safetensors, by name.

    The path `layers/0/up/kernel` of the model is the name `layers.0.up.kernel` of the file, unless
    the mapping has another one. Weights are parameters, statistics and variables of your own
    classes; the states of random streams and optimizers are not.

    Shapes:
        Whole arrays, without padding, in the dtypes of the model or of `like`.

    Cost:
        An all-gather of one array after the other, where processes hold parts of them. The host
        has one array of the file at a time; in a bucket, one file.

    Guarantees:
        A file is complete or absent. A folder has no index while it is written. If processes hold
        parts of arrays, process 0 writes, and the call returns when the files are complete.
        Otherwise each process that calls writes: call it in one of them.

    Args:
        model: An NNX module; or a pytree of arrays, `Sharded`s and variables. All processes call
            this function if their arrays are parts of one.
        path: A file, whose name ends with `.safetensors`, or a folder, which gets
            `model.safetensors`, or several files with `model.safetensors.index.json`. It may be in
            a bucket: `gs://` or `s3://`.
        mapping: The mapping with which `load_weights` reads the file. Each array of the file is
            made of the arrays of the model that it would be read into.
        like: A file or folder with the names, shapes and dtypes to write, such as the one that was
            loaded. It is required where the mapping indexes or reshapes arrays.
        ignore: Names of `like` that are left out; `*` is any text.
        max_shard_size: How many bytes a file of a folder may have; a larger array has a file of its
            own.

    Raises:
        CheckpointError: The files cannot be written, safetensors does not have a dtype, or the
            model does not have all elements of an array of `like`.
        ArgumentError: The mapping does not fit the model, or cannot be inverted.
        BucketError: The bucket cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "linear.safetensors")
        >>> torch_names = {"kernel": training.Weight("weight").T}
        >>> training.export_weights(model, path, torch_names)
        >>> import safetensors.numpy
        >>> {name: x.shape for name, x in safetensors.numpy.load_file(path).items()}
        {'bias': (2,), 'weight': (2, 3)}

    Source:
        `save_pretrained` of Hugging Face, https://huggingface.co/docs/safetensors.
    """
    place = as_place("path", path, f"weights{ENDING}")
    most = as_integer("max_shard_size", max_shard_size, least=1, example=5_000_000_000)
    patterns = as_ignored(ignore)
    if patterns and like is None:
        raise refuse(
            f"ignore={patterns} without like.",
            "ignore names arrays of like that are left out.",
            "Pass mapping={PATH: None} for arrays of the model that are left out.",
        )
    template = None if like is None else as_place("like", like, f"weights{ENDING}")
    weights, _ = list_weights(model)
    sources = find_sources([w.path for w in weights], {} if mapping is None else mapping)
    group = find_group(None) if any(w.spans_processes for w in weights) else None

    def plan() -> tuple[dict[str, ToWrite], dict[str, str]]:
        opened = None if template is None else open_weights("like", template)
        used = [weight for weight in weights if weight.path in sources]
        return _plan(used, sources, opened, patterns), {} if opened is None else opened.metadata

    call = name_call()
    if group is None:
        arrays, metadata = plan()
        _write(place, arrays, metadata, most)
        return
    # No process may fail between two collectives, so all of them check their arguments before.
    arrays, metadata = agree_on_result(group, call, plan)
    # Every process makes the gathers of process 0, in its order.
    left = dict(arrays)
    is_first = group.process.is_first

    def read(name: str) -> np.ndarray:
        return left.pop(name).read()

    def act() -> None:
        errors = []
        if is_first:
            again = {n: x.with_read(functools.partial(read, n)) for n, x in arrays.items()}
            try:
                _write(place, again, metadata, most)
            except Exception as error:
                errors.append(error)
        for name in order_weights(left):
            # The others may not see an error of this process, and go on with the next gather.
            try:
                read(name)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    agree_on_result(group, call, act)


def _write(
    place: Place, arrays: Mapping[str, ToWrite], metadata: Mapping[str, str], most: int
) -> None:
    try:
        write_weights(place, arrays, metadata, most)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{name_call()} cannot write {place}: {type(error).__name__}: {error}.\n\n"
            "A file is complete or absent, and a folder that is not complete has no index.\n\n"
            "Free space or change the permissions, and call it again."
        ) from error


# An array of the model, the change of the array of the file that it is, and its row if the model
# stacks several.
_Use: TypeAlias = tuple[ModelWeight, Weight, int | None]


def _plan(
    weights: Sequence[ModelWeight],
    sources: Mapping[str, Source],
    template: Opened | None,
    ignore: Sequence[str],
) -> dict[str, ToWrite]:
    """Return the arrays to write by name, or raise one error for all that cannot be written."""
    uses: dict[str, list[_Use]] = {}
    for weight in weights:
        source = sources[weight.path]
        for row, part in enumerate(source.parts):
            name = part.name
            if template is not None and not source.is_given and name not in template.arrays:
                name = weight.path if weight.path in template.arrays else name
            uses.setdefault(name, []).append((weight, part, row if source.is_stacked else None))
    problems = [
        f"{weight.path}: it has only a shape" for weight in weights if not _has_values(weight)
    ]
    made: dict[str, ToWrite] = {}
    names = uses if template is None else {**uses, **template.arrays}
    for name in names:
        if is_ignored(name, ignore):
            continue
        found = (
            _invert(name, uses[name])
            if template is None
            else _fill_like(name, uses.get(name, []), template)
        )
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
        else:
            made[name] = found
    if problems:
        raise CheckpointError(
            f"{name_call()}: {len(problems)} array(s) cannot be written:\n"
            f"{format_lines(problems, most=20)}\n\n"
            "Each array of the file is made of arrays of the model, and has a dtype of "
            f"safetensors: {', '.join(map(str, CODES))}.\n\n"
            "Correct the mapping. Where it indexes or reshapes, pass like=FILE with the shapes to "
            "write; ignore=[NAME] leaves an array of that file out."
        )
    return made


def _has_values(weight: ModelWeight) -> bool:
    return isinstance(weight.held, (jax.Array, np.ndarray, np.generic))


def _invert(name: str, uses: Sequence[_Use]) -> ToWrite | str:
    """Return an array that one array of the model becomes, or why it cannot be written."""
    if len(uses) > 1:
        return f"{' and '.join(weight.path for weight, _, _ in uses)} are parts of it"
    [(weight, part, row)] = uses
    if weight.dtype not in CODES:
        return f"{weight.path} is {weight.dtype}"
    orders = list_transposes(part)
    if orders is None:
        return f"{part} of an unknown shape"

    shape = weight.shape if row is None else weight.shape[1:]
    rank = len(shape)
    counted = [[dim % max(rank, 1) for dim in dims] for dims in orders]
    if any(dims and sorted(dims) != list(range(rank)) for dims in counted):
        return f"{part} of an array of {rank} dims"

    def turn(array: np.ndarray) -> np.ndarray:
        for dims in reversed(counted):
            array = np.transpose(array, np.argsort(dims).tolist() if dims else None)
        return array

    turned = turn(make_unread(shape, weight.dtype)).shape
    return ToWrite(turned, weight.dtype, lambda: turn(fetch_weight(weight, row)))


def _fill_like(name: str, uses: Sequence[_Use], template: Opened) -> ToWrite | str:
    """Return an array with the shape and dtype of that of the template."""
    stored = template.arrays.get(name)
    if stored is None:
        return f"like has no array of this name, and {uses[0][0].path} is written to it"
    if not uses:
        return "no array of the model is written to it"
    parts = []
    for weight, part, row in uses:
        shape = weight.shape if row is None else weight.shape[1:]
        try:
            found = apply(part, make_unread(stored.shape, stored.dtype))
        except (ValueError, IndexError) as error:
            return f"{part} of {list(stored.shape)}: {error}"
        if find_kind(weight.dtype) != find_kind(stored.dtype):
            return f"{weight.path} is {weight.dtype}, and the array of like {stored.dtype}"
        if found.shape != shape:
            return f"{weight.path} is {list(shape)}, and {part} is {list(found.shape)}"
        parts.append(part)
    if sum(math.prod(w.shape if row is None else w.shape[1:]) for w, _, row in uses) != math.prod(
        stored.shape
    ) or (len(parts) > 1 and not _cover(parts, stored.shape)):
        paths = " and ".join(weight.path for weight, _, _ in uses)
        return f"{paths} are not all of its elements, each once"

    def read() -> np.ndarray:
        made = np.empty(stored.shape, stored.dtype)
        for weight, part, row in uses:
            convert(weight.path, apply(part, made), fetch_weight(weight, row))
        return made

    return ToWrite(stored.shape, stored.dtype, read)


def _cover(parts: Sequence[Weight], shape: tuple[int, ...]) -> bool:
    """Return whether parts have each element of an array exactly once, if they have as many."""
    seen = np.zeros(shape, np.bool_)
    for part in parts:
        apply(part, seen)[...] = True
    return bool(seen.all())
