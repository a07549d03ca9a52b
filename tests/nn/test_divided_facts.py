"""What `explain` says of attention over positions, and of experts, against the compiled program."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist import nn
from tests.nn.attention import KINDS, by_definition, distance, draw, on_mesh, rows_of, whole
from tests.nn.experts_oracle import EXPERTS, WIDTH, expert, make, make_params, make_rows, weights_of


def _numbers(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", text)]


def _explain_attention(kind: str, *, grads: bool, kv_heads: int = 4, **options: Any) -> Any:
    strategy = on_mesh((2, 4))
    length = options.pop("length", 32)
    q, k, v, *_ = draw(0, 2, length, 4, kv_heads, 8)
    order = options.pop("order", "zigzag")

    def step(q: Any, k: Any, v: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            q, k, v = nn.split_positions((q, k, v), order=order)
            return (nn.attention(q, k, v, kind=kind, **options) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v) if grads else loss(q, k, v)

    return strategy.lower(step, rows_of(strategy, q, k, v)).explain()


def _sent(report: Any, *kinds: str) -> int:
    rows = [r for r in report.compiled if not kinds or r.kind in kinds]
    return round(sum(r.sent_inside * r.count * (r.times or 1) for r in rows))


# How a kind communicates: other collectives sum the loss, or lay out the gradients of the inputs.
_OWN = {
    "ulysses": ("all-to-all",),
    "gather": ("all-gather", "reduce-scatter"),
    "ring": ("collective-permute",),
}


@pytest.mark.parametrize(
    ("kind", "kv_heads"), [("ulysses", 4), ("ulysses", 2), ("gather", 2), ("ring", 1)]
)
def test_attention_sends_as_many_bytes_as_explain_says(kind: str, kv_heads: int) -> None:
    report = _explain_attention(kind, grads=False, kv_heads=kv_heads)
    [(call, line, facts)] = report.work
    assert call == "nn.attention"
    assert "test_divided_facts.py" in line
    found = dict(facts)
    assert found["kind"] == f"{kind}, zigzag order over 4 devices of the axis 'positions'"
    assert found["positions"] == "32, 8 on a device"
    assert "masked" not in found
    forward = _numbers(found["a device sends"])[0]
    assert _sent(report, *_OWN[kind]) == forward
    assert f"  a device sends  at most {forward:,} bytes" in str(report)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_gradients_of_attention_send_as_many_bytes_as_explain_says(kind: str) -> None:
    report = _explain_attention(kind, grads=True, order="contiguous")
    forward, backward, *_ = _numbers(dict(report.work[0][2])["a device sends"])
    assert _sent(report, *_OWN[kind]) == forward + backward


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_share_of_hidden_blocks_is_that_of_the_mask(kind: str, order: str) -> None:
    length, devices, columns = 2048, 4, 128
    report = _explain_attention(
        kind, grads=False, length=length, causal=True, block=columns, order=order
    )
    found = dict(report.work[0][2])
    parts = np.arange(length).reshape(2 * devices, -1)
    if order == "zigzag":
        parts = np.stack([parts[:devices], parts[: devices - 1 : -1]], 1)
    numbers = parts.reshape(-1)
    # Blocks of rows lie within a run of positions: half of a device's rows, or all of them.
    rows = length // devices // (2 if order == "zigzag" else 1)
    sees = numbers[:, None] >= numbers[None]
    pairs = sees.reshape(length // rows, rows, -1, columns).any((1, 3))
    assert found["masked"] == f"{1 - pairs.mean():.1%} of the pairs of blocks are skipped"
    of_devices = pairs.reshape(devices, -1).sum(1)
    if kind == "ulysses" or order == "zigzag":
        assert found["balance"] == "each device has the same work"
    else:
        # In a ring the last device computes in each turn, and the others wait for it.
        most = of_devices.max() / of_devices.mean()
        assert f"{most:.2f} times the mean work" in found["balance"]


def test_a_ring_within_another_division_is_attention() -> None:
    strategy = on_mesh((2, 2, 2), ("data", "stage", "positions"))
    x = np.random.default_rng(0).normal(size=(2, 8, 2, 4)).astype("f4")

    def step(x: Any) -> Any:
        spec = jax.sharding.PartitionSpec()
        inside = jax.shard_map(
            lambda x: nn.attention(x, x, x, kind="ring"),
            in_specs=spec,
            out_specs=spec,
            axis_names={"stage"},
            check_vma=False,
        )
        return inside(x)

    found = whole(strategy, strategy.run(step, rows_of(strategy, x)))
    assert distance(found, by_definition(x, x, x)) < 1e-6


def _explain_experts(strategy: Any, rows: int, **options: Any) -> tuple[Any, float]:
    """A report of one layer, and the share that is dropped if all tokens choose the same."""
    params = make_params()

    def step(params: Any, x: Any) -> Any:
        y, (_, dropped) = nn.experts(
            expert, params["router"], weights_of(params), x, top_k=2, **options
        )
        return y, jaxdist.get_replica_context().all_reduce("mean", dropped)

    x = np.ones((rows, 12, WIDTH), np.float32)
    args = (params, jax.device_put(x, strategy.per_replica_sharding))
    return strategy.lower(step, args).explain(), float(strategy.run(step, args)[1])


def test_experts_send_as_many_bytes_and_drop_at_most_as_much_as_explain_says() -> None:
    report, dropped = _explain_experts(make((2, 4)), 8)
    [(call, line, facts)] = report.work
    assert call == "nn.experts"
    assert "test_divided_facts.py" in line
    found = dict(facts)
    assert found["experts"] == "8, 2 on each of 4 devices of the axis 'experts'; 2 for each token"
    assert found["groups"] == "4 of 12 tokens, 1 on a device"
    # ceil(1.25 * 2 * 12 / 8)
    assert found["capacity"] == (
        f"4 tokens of a group for each expert; {EXPERTS * 4} rows for 24 choices"
    )
    assert dropped == pytest.approx(2 / 3, abs=1e-6)
    assert found["dropped"].startswith("at most 66.7% of the choices")
    there, back = _numbers(found["a device sends"])
    assert there == back == EXPERTS * 4 * WIDTH * 4 * 3 // 4
    assert _sent(report, "all-to-all") == there + back


def test_experts_whose_devices_do_not_divide_the_groups_and_that_drop_nothing_say_so() -> None:
    report, dropped = _explain_experts(make((2, 4)), 6, capacity=None)
    found = dict(report.work[0][2])
    assert found["groups"] == "3 of 12 tokens, 1 on a device, and fewer on the last"
    assert (found["dropped"], dropped) == ("nothing", 0.0)
    alone = dict(_explain_experts(make((8, 1)), 8)[0].work[0][2])
    assert alone["experts"] == "8, on one device; 2 for each token"
    assert "a device sends" not in alone


def test_facts_are_those_of_each_step_also_where_jax_has_traced_the_layer_before() -> None:
    params, x = make_params(), make_rows()
    layer = jax.checkpoint(
        lambda params, x: nn.experts(expert, params["router"], weights_of(params), x, top_k=2)[0]
    )
    for _ in range(2):
        strategy = make((2, 4))
        args = (params, jax.device_put(x, strategy.per_replica_sharding))
        report = strategy.lower(lambda p, x: jnp.tanh(layer(p, x)), args).explain()
        assert [call for call, *_ in report.work] == ["nn.experts"]
