"""Compares a step on R replicas with the same step on one device, and explains the difference."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdist._reports import Report
from jaxdist.errors import StateDivergenceError

# Factors are medians of ratios of rounded numbers; factors this close count as equal.
_SAME_FACTOR = 0.02


@dataclasses.dataclass(frozen=True)
class Setting:
    """Facts about the step, used to guess the cause of a factor."""

    num_replicas: int
    num_real: int | None = None  # N, the real examples
    num_rows: int | None = None  # B, the replicas times the rows of the largest one
    is_uneven: bool = False
    kinds: tuple[str, ...] = ()  # types of NNX variables, and "random key"
    is_adaptive: bool = False  # the optimizer is, and no compared leaf shows the scale
    strategies: tuple[str, ...] = ()  # names under which the step closes over a strategy


def is_near(a: float, b: float) -> bool:
    """Whether two factors count as equal."""
    return abs(a - b) <= _SAME_FACTOR * abs(b)


def explain_factor(setting: Setting, factor: float | None, *, has_local_state: bool) -> list[str]:
    """Return sentences on the likely cause; `factor` is None if no common factor exists."""
    count = setting.num_replicas
    said: list[str] = []
    if factor is not None:
        if is_near(factor, count):
            said.append(
                f"{count} is the number of replicas: the loss is a mean over the rows of a replica "
                "and the gradients are summed, or they are summed twice. Use "
                "all_reduce('mean', grads) once; or divide the loss by the global batch "
                "(nn.compute_average_loss) and use all_reduce('sum', grads) once."
            )
        if is_near(factor, 1 / count):
            said.append(
                f"1/{count} is one over the number of replicas: the loss is divided by the global "
                "batch (nn.compute_average_loss) and the gradients are averaged as well, or the "
                "loss is a sum over rows and the gradients are averaged. Use "
                "all_reduce('sum', grads) in both cases."
            )
        real, rows = setting.num_real, setting.num_rows
        if real and rows and real != rows and (is_near(factor, real / rows)):
            said.append(
                f"{real}/{rows} is N/B, the real examples over the rows of a full batch: the loss "
                "is divided by rows that hold no example, or replicas without examples count in "
                "the mean. Divide by the real examples of all replicas: "
                "nn.compute_average_loss(loss, global_batch_size=all_reduce('sum', mask.sum())), "
                "then all_reduce('sum', grads)."
            )
        # The factor of an uneven batch depends on the data, so no number identifies it. Report an
        # uneven batch only if no exact ratio explains the factor.
        if not said and setting.is_uneven:
            said.append(f"Likely here: {_UNEVEN}.")
        elif not said:
            said.append(
                f"{factor:.4g} is neither the number of replicas ({count}) nor one over it. Look "
                "for a constant that depends on the number of replicas or on the local batch size."
            )
    elif has_local_state:
        said.append(
            "State that comes back different on each replica was updated with local gradients: "
            "all-reduce them first, grads = context.all_reduce('mean', grads)."
        )
    else:
        said.append(_explain_without_factor(setting))
    if setting.strategies:
        said.append(
            f"The step closes over a strategy ({', '.join(setting.strategies)}). If it reads "
            f"num_replicas_in_sync from it, it gets {count} on one device too, and the difference "
            "exists only in this comparison; read it from jaxdist.get_replica_context()."
        )
    return said


_UNEVEN = (
    "the batch is uneven, and a mean over each replica's own examples counts replicas with few of "
    "them as much as others (divide by the examples of all replicas: nn.compute_average_loss with "
    "global_batch_size, then all_reduce('sum', grads))"
)


def _explain_without_factor(setting: Setting) -> str:
    why = []
    if setting.is_uneven:
        why.append(_UNEVEN)
    if "BatchStat" in setting.kinds:
        why.append(
            "batch statistics are of each replica's rows (BatchStat variables; "
            "check with model.eval(), or batch norm with the statistics all-reduced)"
        )
    if "RngKey" in setting.kinds:
        why.append(
            "every replica draws its own random numbers (dropout; check with model.eval(), or "
            "draw from nn.example_keys)"
        )
    found = f" Kinds of variables among the arguments: {', '.join(setting.kinds)}."
    return (
        "No single factor explains it, so sum or mean is not the only cause. "
        + (f"Likely here: {'; '.join(why)}. " if why else "")
        + "In general: batch statistics, dropout, an uneven batch, or gradients that enter the "
        "update nonlinearly (clipping, weight decay beside a wrong scale, an "
        "adaptive optimizer). A function that returns the all-reduced gradients instead of "
        "applying them tells these apart." + (found if setting.kinds else "")
    )


# Tolerated rounding error of a sum, in units in the last place of its largest summand.
_ROUNDING = 8


@dataclasses.dataclass(frozen=True)
class LeafComparison:
    """The change of one array on R replicas, compared with its change on one device."""

    name: str
    is_equal: bool
    factor: float | None = None  # median of the ratios; None if one device does not change it
    is_uniform: bool = False  # whether all its elements have that factor
    scale: float = 0.0  # the larger of the two largest changes
    noise: float = 0.0  # changes below this are rounding errors
    remark: str = ""

    @property
    def is_resolved(self) -> bool:
        """Whether the array changes by more than rounding errors."""
        return bool(self.remark) or self.scale > self.noise

    @property
    def differs(self) -> bool:
        """Whether the changes differ by more than the tolerance and rounding errors."""
        return self.is_resolved and not self.is_equal

    def __repr__(self) -> str:
        if self.remark:
            return f"{self.name}: {self.remark}"
        if self.factor is None:
            return f"{self.name}: changes only on the replicas"
        return f"{self.name}: {self.factor:.4g} times{'' if self.is_uniform else ', not uniform'}"


def compare(
    name: str, before: np.ndarray | None, many: np.ndarray, one: np.ndarray, rtol: float
) -> LeafComparison:
    """Compare the changes since `before`; with `before=None` compare the values."""
    if many.shape != one.shape:
        found = f"of shape {list(many.shape)} on the replicas, {list(one.shape)} on one device"
        return LeafComparison(name, is_equal=False, remark=found)
    exact = np.issubdtype(one.dtype, np.integer) or one.dtype == bool
    noise = 0.0
    a, b = _as_float64(many), _as_float64(one)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        same = bool(np.array_equal(a, b, equal_nan=True))
        return LeafComparison(name, is_equal=same, remark="not finite")
    if before is not None:
        start = _as_float64(before)
        if not exact:
            # The difference of two large numbers contains their rounding errors, however small the
            # change is.
            noise = _ROUNDING * _eps(one.dtype) * max(_max_abs(x) for x in (start, a, b))
        a, b = a - start, b - start
    scale = max(_max_abs(a), _max_abs(b))
    bound = 0.0 if exact else rtol * scale + noise
    is_equal = _max_abs(a - b) <= bound
    # Rounding dominates the ratios of small elements, so only large elements determine the factor.
    chosen = np.abs(b) > max(0.01 * _max_abs(b), noise)
    if not chosen.any():
        return LeafComparison(name, is_equal, None, False, scale, noise)
    factor = float(np.median((a[chosen] / b[chosen]).real))
    off = _max_abs(a - factor * b)
    is_uniform = off <= rtol * max(_max_abs(a), _max_abs(b) * abs(factor)) + noise * (1 + factor**2)
    return LeafComparison(name, is_equal, factor, bool(is_uniform), scale, noise)


def raise_noise_floor(leaves: Sequence[LeafComparison]) -> tuple[LeafComparison, ...]:
    """Raise the noise level of leaves that hold only the rounding error of larger leaves.

    The gradient of some parameters is mathematically zero (the bias of attention keys). The
    computed gradient is then only the rounding error of larger numbers, and is not compared.
    """
    largest = max((x.scale for x in leaves), default=0.0)
    floor = _ROUNDING * _eps(np.dtype(np.float32)) * largest
    return tuple(
        x if x.remark or x.scale > floor else dataclasses.replace(x, noise=max(x.noise, floor))
        for x in leaves
    )


def _as_float64(x: np.ndarray) -> np.ndarray:
    wide = np.complex128 if np.issubdtype(x.dtype, np.complexfloating) else np.float64
    return x.astype(wide)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def _max_abs(x: np.ndarray) -> float:
    return float(np.abs(x).max()) if x.size else 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class GradientReport(Report):
    """The result of `Strategy.check_gradients`; print it to see differences and their cause.

    Args:
        setting: Facts about the step.
        leaves: Every compared array.
        not_compared: Results that differ between replicas, so they have no single value.

    Example:
        >>> def step(w, x):
        ...     return w - 0.1 * get_replica_context().all_reduce("sum", w * x.mean())
        >>> strategy = MirroredStrategy()
        >>> x = jax.device_put(np.arange(8.0, dtype="float32"), strategy.per_replica_sharding)
        >>> report = strategy.check_gradients(step, (1.0, x))
        >>> report.is_equal, round(report.factor)
        (False, 8)
    """

    setting: Setting
    leaves: tuple[LeafComparison, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def different(self) -> tuple[LeafComparison, ...]:
        """Leaves that differ by more than the tolerance, and change by more than rounding."""
        return tuple(x for x in self.leaves if x.differs)

    @property
    def is_equal(self) -> bool:
        """Whether the step has equal results on R replicas and on one device."""
        return not self.different

    @property
    def is_uniform(self) -> bool:
        """Whether one factor explains every difference.

        The second moment of an adaptive optimizer has the squared factor.
        """
        return self._common_factor() is not None

    @property
    def factor(self) -> float | None:
        """The change on R replicas divided by that on one device; 1.0 if equal.

        This is the common factor of all differences, or else the median; None without any factor.
        """
        if self.is_equal:
            return 1.0
        common = self._common_factor()
        if common is not None:
            return common
        factors = [x.factor for x in self.different if x.factor is not None]
        return float(np.median(factors)) if factors else None

    def _common_factor(self) -> float | None:
        factors = [x.factor for x in self.different if x.is_uniform and x.factor]
        if not factors or len(factors) < len(self.different):
            return None
        # Try the factor nearest to 1 first: `f` explains `f**2` (a second moment), not the reverse.
        for candidate in sorted(factors, key=lambda f: abs(np.log(abs(f)))):
            if all(is_near(f, candidate) or is_near(f, candidate**2) for f in factors):
                return candidate
        return None

    def raise_if_different(self) -> None:
        """Raise an error if the step has different results on R replicas and on one device.

        Raises:
            StateDivergenceError: A leaf differs; the message is the report.

        Example:
            >>> def step(w, x):
            ...     return w - 0.1 * get_replica_context().all_reduce("mean", w * x.mean())
            >>> strategy = MirroredStrategy()
            >>> x = jax.device_put(np.arange(8.0, dtype="float32"), strategy.per_replica_sharding)
            >>> strategy.check_gradients(step, (1.0, x)).raise_if_different()
        """
        if not self.is_equal:
            raise StateDivergenceError(self.text())

    def parts(self) -> Iterator[str]:
        """Yield the lines of the report: the differences, then their explanation."""
        yield self._headline()
        yield from self._rows()
        still = sum(not x.is_resolved for x in self.leaves)
        if still:
            yield f"  changed by no more than rounding, so not compared: {still}"
        if self.not_compared:
            yield f"  different on each replica, not compared: {_format_names(self.not_compared)}"
        if self.setting.is_adaptive:
            yield ""
            yield _ADAPTIVE
        if not self.is_equal:
            yield ""
            is_local = any(x.remark.startswith("different on each") for x in self.different)
            yield from explain_factor(self.setting, self._common_factor(), has_local_state=is_local)

    def _headline(self) -> str:
        against = f"GradientReport: {self.setting.num_replicas} replicas against one device, "
        if self.is_equal:
            return f"{against}equal in all {len(self.leaves)} leaves"
        what = f"different in {len(self.different)} of {len(self.leaves)} leaves"
        factor = self.factor
        if factor is None:
            return against + what
        how = "by the factor" if self.is_uniform else "by no uniform factor; the median is"
        return f"{against}{what}, {how} {factor:.4g}"

    def _rows(self) -> list[str]:
        rows = [f"  {x!r}" for x in self.different[:10]]
        more = len(self.different) - len(rows)
        return [*rows, *([f"  and {more} more"] if more > 0 else [])]


_ADAPTIVE = (
    "The optimizer is adaptive (such as Adam): how far it moves the parameters hardly depends "
    "on the scale of the gradients. A wrong scale shows in its state (mu, nu), if the step "
    "returns or updates it; otherwise check a function that returns the all-reduced gradients."
)


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
