"""The operations of one stage, on its slots: forward, backward, and the backward in two parts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist import _compat
from jaxdist._pipeline.inputs import Leaves, Parts, merge, pick
from jaxdist._pipeline.layers import Layers
from jaxdist._pipeline.model import Model
from jaxdist._pipeline.schedules import Ends
from jaxdist._pipeline.slots import Slots
from jaxdist._values import wide_dtype

# Buffers by name: x, g, r, d (slots), up, down (what moves after a tick), sums, loss, aux.
State: TypeAlias = dict[str, Any]
# One tick of the table as this device reads it: scalars. `on` is whether the operation is that of
# this stage, where all stages run it; without it, only that of this stage runs.
Row: TypeAlias = dict[str, Any]


class Sums(NamedTuple):
    """Sums over micro-batches of the gradients of wanted leaves, by part."""

    embed: Leaves
    layers: Leaves
    head: Leaves
    shared: Leaves
    rows: Leaves


class Stage:
    """What one device does in its ticks.

    Args:
        model: The functions of the model.
        slots: The slots of the table.
        me: The number of this stage.
        of_layers: The factor of the layers' own losses.
        wanted: Which leaves have gradients, by part.
        values: The leaves that this device has, by part.
    """

    def __init__(
        self, model: Model, slots: Slots, me: Any, of_layers: float, wanted: Parts, values: Parts
    ) -> None:
        self._model = model
        self._slots = slots
        self._me = me
        self._of_layers = of_layers
        self._wanted = wanted
        self._has_gradients = slots.table.has_gradients
        # [chunks, layers of a chunk, ...] in any case.
        stacks = [a[None] for a in values.layers] if slots.table.chunks == 1 else values.layers
        self._values = values._replace(layers=stacks)

    @functools.cached_property
    def _layers(self) -> Layers:
        values, wanted = self._values, self._wanted
        return Layers(
            self._model,
            [*wanted.layers, *wanted.shared],
            [*_without_dim(values.layers), *_avals(values.shared)],
            len(values.layers),
            _without_dim(values.keys),
            self._of_layers,
        )

    def start(self) -> State:
        """Return the state before the first tick: empty slots, and sums of zero."""
        sizes = self._slots.sizes
        x = self._model.x_avals
        floats = pick(x, self._model.x_floats)
        state: State = {
            # One more slot, for what nobody needs.
            "x": [_blank(a, sizes["x"] + 1) for a in x],
            "up": [_blank(a) for a in x],
            "loss": jnp.zeros((), self._model.loss_dtype),
            "aux": [_blank(a, self._slots.table.micro_batches) for a in self._model.aux_avals],
        }
        if self._has_gradients:
            state |= {
                "g": [_blank(a, sizes["g"] + 1) for a in floats],
                "r": [_blank(a, sizes["r"]) for a in self._layers.kept_avals],
                "down": [_blank(a) for a in floats],
                "sums": Sums(
                    *(
                        [jnp.zeros(a.shape, wide_dtype(a.dtype)) for a in pick(values, wanted)]
                        for values, wanted in zip(self._values[:5], self._wanted[:5], strict=True)
                    )
                ),
            }
        if self._slots.table.has_two_parts:
            state["d"] = [_blank(a, sizes["d"]) for a in self._layers.saved_avals]
        return state

    def results(self, state: State) -> Sums:
        """Return the sums after the last tick, with gradients of layers as they are stacked."""
        if not self._has_gradients:
            return Sums([], [], [], [], [])
        sums: Sums = state["sums"]
        if self._slots.table.chunks == 1:
            sums = sums._replace(layers=[a[0] for a in sums.layers])
        return sums

    def operation(self, kind: str, ends: Ends) -> Callable[[State, Row], State]:
        """Return the operation of a kind, in ticks of which some have an end of the model."""
        run = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_of_input,
            "W": self._backward_of_weights,
        }[kind]

        def run_named(state: State, row: Row) -> State:
            with jax.named_scope(f"pipeline_{kind}"):
                return run(state, row, ends)

        return run_named

    def take_input(self, state: State, row: Row, arrived: Leaves) -> State:
        """Put what the stage before has computed where the table says."""
        return {**state, "x": _put(state["x"], row["put_x"], arrived)}

    def take_cotangent(self, state: State, row: Row, arrived: Leaves) -> State:
        """Put the cotangent of this stage's output where the table says."""
        return {**state, "g": _put(state["g"], row["put_g"], arrived)}

    def _forward(self, state: State, row: Row, ends: Ends) -> State:
        one, on = _get(self._values.rows, row["micro_batch"]), row.get("on")
        is_first = row["is_first"] > 0

        def embed() -> Leaves:
            x = self._model.embed(self._values.embed, self._values.shared, one)
            if on is None:
                return x
            return [jnp.where(is_first, a, b) for a, b in zip(x, get(), strict=True)]

        def get() -> Leaves:
            return _get(state["x"], row["x"])

        x = _compat.cond_in_part(ends.first, _meets(row, "first"), embed, get)
        w, keys = self._read_chunk(row), _get(self._values.keys, row["micro_batch"])
        first = self._find_first_layer(row)
        if self._has_gradients:
            y, losses, kept = self._layers.run(w, x, keys, first)
            state = {**state, "r": _put(state["r"], row["r"], kept, on)}
        else:
            stacks, shared = self._split(w)
            y, losses = self._model.run_layers(stacks, shared, x, keys, first)
        state = {**state, "up": y}
        if losses is not None:
            [state["loss"]] = _add([state["loss"]], [losses * self._of_layers], on)
        if self._model.head_axis is not None:
            return state
        is_own = None if on is None else on & (row["is_last"] > 0)
        return _compat.cond_in_part(
            ends.last,
            _meets(row, "last"),
            lambda: self._run_head(state, y, row, is_own),
            lambda: state,
        )

    def _run_head(self, state: State, y: Leaves, row: Row, on: Any = None) -> State:
        """Add the loss, and put the cotangent of y into a slot until the backward."""
        one = _get(self._values.rows, row["micro_batch"])
        if not self._has_gradients:
            loss, aux = self._model.head(self._values.head, self._values.shared, y, one)
            aux = _put(state["aux"], row["micro_batch"], aux, on)
            return {**state, "loss": _add([state["loss"]], [loss], on)[0], "aux": aux}
        loss, g_y, state = self._differentiate_head(state, y, one, row["micro_batch"], on=on)
        [loss] = _add([state["loss"]], [loss], on)
        return {**state, "loss": loss, "g": _put(state["g"], row["g"], g_y, on)}

    def run_split_head(self, state: State, row: Row, axis: str, stages: int) -> State:
        """Run the head of the last stage's output on all stages, each with its part.

        All stages compute the same loss. A `psum` in it is transposed to a `psum`, so each stage
        starts with its share of the cotangent of the loss. Then gradients of a stage's own part of
        the head are whole, and all others are to be summed over the stages.
        """
        is_last = self._me == stages - 1
        y = [send_to_all(leaf, is_last, axis) for leaf in state["up"]]
        one = _get(self._values.rows, row["head_micro_batch"])
        if not self._has_gradients:
            loss, _ = self._model.head(self._values.head, self._values.shared, y, one)
            return {**state, "loss": state["loss"] + jnp.where(is_last, loss, 0)}
        micro_batch = row["head_micro_batch"]
        loss, g_y, state = self._differentiate_head(state, y, one, micro_batch, 1 / stages)
        loss = state["loss"] + jnp.where(is_last, loss * stages, 0)
        g_y = [_sum(g, axis) for g in g_y]
        return {**state, "loss": loss, "g": _put(state["g"], row["head_g"], g_y)}

    def _differentiate_head(
        self,
        state: State,
        y: Leaves,
        one: Leaves,
        micro_batch: Any,
        share: float = 1.0,
        on: Any = None,
    ) -> tuple[Any, Leaves, State]:
        """Return the loss, the cotangent of y, and the state with all else that the head gives."""
        h, shared = self._values.head, self._values.shared
        of, of_y = self._wanted, self._model.x_floats

        def loss_of(floats: Leaves, *chosen: Leaves) -> tuple[Any, Leaves]:
            loss, aux = self._model.head(
                merge(chosen[0], h, of.head),
                merge(chosen[1], shared, of.shared),
                merge(floats, y, of_y),
                merge(chosen[2], one, of.rows),
            )
            return share * loss, aux

        chosen = pick(h, of.head), pick(shared, of.shared), pick(one, of.rows)
        loss, pull, aux = jax.vjp(loss_of, pick(y, of_y), *chosen, has_aux=True)
        g_y, g_h, g_shared, g_rows = pull(jnp.ones_like(loss))
        sums: Sums = state["sums"]
        sums = sums._replace(
            head=_add(sums.head, g_h, on),
            shared=_add(sums.shared, g_shared, on),
            rows=_add_row(sums.rows, micro_batch, g_rows, on),
        )
        aux = _put(state["aux"], micro_batch, aux, on)
        return loss, g_y, {**state, "sums": sums, "aux": aux}

    def _backward(self, state: State, row: Row, ends: Ends) -> State:
        kept, g = _get(state["r"], row["r"]), _get(state["g"], row["g"])
        g_w, g_x = self._layers.pull(self._read_chunk(row), kept, g)
        return self._pass_on(self._add_layers(state, row, g_w), row, g_x, ends)

    def _backward_of_input(self, state: State, row: Row, ends: Ends) -> State:
        kept, g = _get(state["r"], row["r"]), _get(state["g"], row["g"])
        g_w, g_x, saved = self._layers.pull_input(self._read_chunk(row), kept, g)
        state = {**state, "d": _put(state["d"], row["d"], saved, row.get("on"))}
        return self._pass_on(self._add_layers(state, row, g_w), row, g_x, ends)

    def _backward_of_weights(self, state: State, row: Row, _: Ends) -> State:
        kept, saved = _get(state["r"], row["r"]), _get(state["d"], row["d"])
        return self._add_layers(
            state, row, self._layers.pull_weights(self._read_chunk(row), kept, saved)
        )

    def _pass_on(self, state: State, row: Row, g_x: Leaves, ends: Ends) -> State:
        """Send the cotangent of the input down; the first piece gives it to the embedding."""
        of = self._wanted
        state = {**state, "down": g_x}
        if not any((*of.embed, *of.shared, *of.rows)):
            return state
        e, shared = self._values.embed, self._values.shared
        one = _get(self._values.rows, row["micro_batch"])

        def embed(*chosen: Leaves) -> Leaves:
            x = self._model.embed(
                merge(chosen[0], e, of.embed),
                merge(chosen[1], shared, of.shared),
                merge(chosen[2], one, of.rows),
            )
            return pick(x, self._model.x_floats)

        on = row["on"] & (row["is_first"] > 0) if "on" in row else None

        def add(sums: Sums) -> Sums:
            chosen = pick(e, of.embed), pick(shared, of.shared), pick(one, of.rows)
            g_e, g_shared, g_rows = jax.vjp(embed, *chosen)[1](g_x)
            return sums._replace(
                embed=_add(sums.embed, g_e, on),
                shared=_add(sums.shared, g_shared, on),
                rows=_add_row(sums.rows, row["micro_batch"], g_rows, on),
            )

        sums = _compat.cond_in_part(
            ends.first, _meets(row, "first"), add, lambda sums: sums, state["sums"]
        )
        return {**state, "sums": sums}

    def _add_layers(self, state: State, row: Row, found: Sequence[Any]) -> State:
        """Add gradients of a chunk and of what all layers use; those of the other part are None."""
        sums: Sums = state["sums"]
        count, on = len(sums.layers), row.get("on")
        layers = [
            a if g is None else _add_row([a], row["chunk"], [g], on)[0]
            for a, g in zip(sums.layers, found[:count], strict=True)
        ]
        shared = [
            a if g is None else _add([a], [g], on)[0]
            for a, g in zip(sums.shared, found[count:], strict=True)
        ]
        return {**state, "sums": sums._replace(layers=layers, shared=shared)}

    def _read_chunk(self, row: Row) -> Leaves:
        """Return the stacks of a chunk, and what all layers use."""
        if self._slots.table.chunks == 1:
            stacks = [a[0] for a in self._values.layers]
        else:
            stacks = _get(self._values.layers, row["chunk"])
        return [*stacks, *self._values.shared]

    def _split(self, w: Leaves) -> tuple[Leaves, Leaves]:
        count = len(self._values.layers)
        return w[:count], w[count:]

    def _find_first_layer(self, row: Row) -> Any:
        """The number of the first layer of a chunk: pieces are in the order of the model."""
        each = self._values.layers[0].shape[1]
        return (row["chunk"] * self._slots.table.stages + self._me) * each


def _avals(leaves: Leaves) -> Leaves:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]


def _without_dim(leaves: Leaves) -> Leaves:
    return [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in leaves]


def _blank(aval: Any, *dims: int) -> Any:
    """Return zeros, also for random keys."""
    shape = (*dims, *aval.shape)
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, aval.dtype)
    impls: list[Any] = []

    def read(keys: Any) -> Any:
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    words = jax.eval_shape(read, jax.ShapeDtypeStruct(shape, aval.dtype))
    return jax.random.wrap_key_data(jnp.zeros(words.shape, words.dtype), impl=impls[0])


def _get(buffers: Leaves, slot: Any) -> Leaves:
    return [jax.lax.dynamic_index_in_dim(b, slot, 0, keepdims=False) for b in buffers]


def _meets(row: Row, end: str) -> Any:
    """Whether a stage enters what an end of the model does: where all run it, all in one tick."""
    return row[f"{'has' if 'on' in row else 'is'}_{end}"] > 0


def _put(buffers: Leaves, slot: Any, values: Leaves, on: Any = None) -> Leaves:
    """Put values into a slot, unless `on` is false."""
    if on is not None:
        held = _get(buffers, slot)
        values = [jnp.where(on, v, h) for v, h in zip(values, held, strict=True)]
    return [
        jax.lax.dynamic_update_index_in_dim(b, v, slot, 0)
        for b, v in zip(buffers, values, strict=True)
    ]


def _add(sums: Leaves, values: Leaves, on: Any = None) -> Leaves:
    """Add values to sums, unless `on` is false."""
    if on is not None:
        values = [jnp.where(on, v, 0) for v in values]
    return [a + b.astype(a.dtype) for a, b in zip(sums, values, strict=True)]


def _add_row(sums: Leaves, index: Any, values: Leaves, on: Any = None) -> Leaves:
    return _put(sums, index, _add(_get(sums, index), values, on))


def _sum(array: Any, axis: str) -> Any:
    """Return the sum over stages, in at least float32."""
    return jax.lax.psum(array.astype(wide_dtype(array.dtype)), axis).astype(array.dtype)


def send_to_all(array: Any, is_last: Any, axis: str) -> Any:
    """Return the array of the last stage: the sum of it and of zeros, exact in any dtype."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = send_to_all(jax.random.key_data(array), is_last, axis)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    chosen = jnp.where(is_last, array, jnp.zeros_like(array))
    if array.dtype == bool:
        return jax.lax.psum(chosen.astype(jnp.int32), axis) > 0
    return jax.lax.psum(chosen, axis)
