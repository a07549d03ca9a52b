"""Concrete arrays that are JAX tracers too."""

from typing import Any

from jax._src import core as _core


class HeldTracer(_core.Tracer[Any]):
    """A concrete array of one replica, with a mark that names its origin.

    It is a tracer because JAX treats every concrete operand of `jax.lax.psum` as a constant. In
    every other respect it behaves like the array that it holds.
    """

    __slots__ = ("held", "mark")

    def __init__(self, trace: Any, held: Any, mark: Any) -> None:
        super().__init__(trace, _core.typeof(held))
        self.held = held
        self.mark = mark

    def is_of(self, trace: Any) -> bool:
        return self._trace is trace

    def to_concrete_value(self) -> Any:
        self.mark.is_read = True
        return self.held

    def full_lower(self) -> "HeldTracer":
        return self

    def block_until_ready(self) -> "HeldTracer":
        self.held.block_until_ready()
        return self


def _forward_to_held(name: str) -> property:
    return property(lambda self: _read(self, name))


def _read(tracer: HeldTracer, name: str) -> Any:
    # A representation decides nothing; messages read it.
    tracer.mark.is_read = tracer.mark.is_read or name in _READS
    return getattr(tracer.held, name)


_READS = frozenset({"item", "tobytes", "tolist", "__array__", "__complex__", "__float__"})


# JAX raises an error for most of these members of a tracer; a concrete array has them.
for _name in (
    "addressable_data addressable_shards committed copy_to_host_async device devices format "
    "global_shards is_deleted is_fully_addressable is_fully_replicated item "
    "on_device_size_in_bytes sharding tobytes tolist unsafe_buffer_pointer __array__ __complex__ "
    "__dlpack__ __dlpack_device__ __float__ __format__ __reduce__ __repr__ __str__"
).split():
    setattr(HeldTracer, _name, _forward_to_held(_name))
