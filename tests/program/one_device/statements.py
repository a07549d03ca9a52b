"""Statements of random programs, as source: each has a meaning on one device that holds all rows.

Names in a statement: `{a}`, `{b}` are arrays of rows (`[rows, 4]`), `{w}`, `{v}` arrays of shape
`[4]` and `{m}` one of shape `[4, 4]`, which are equal on all replicas. `c` reduces over replicas:
on one device `c.sum`, `c.max` and `c.gather` give their argument. `n` is the number of all rows.
"""

# What a program of one row is, applied to each row.
OF_A_ROW = {
    "tanh": "jnp.tanh({a})",
    "softmax": "jax.nn.softmax({a}, -1)",
    "gelu": "jax.nn.gelu({a})",
    "sort": "jnp.sort({a}, -1)",
    "argsort": "jnp.take_along_axis({a}, jnp.argsort({b}, -1), -1)",
    "argmax": "{a} + jnp.argmax({b}, -1, keepdims=True).astype({a}.dtype)",
    "top_k": "jnp.tile(lax.top_k({a}, 2)[0], (1, 2))",
    "cumsum": "jnp.cumsum({a}, 1)",
    "cumprod": "lax.cumprod({a}, axis=1)",
    "cummax": "lax.cummax({a}, axis=1, reverse=True)",
    "matmul": "jnp.tanh({a} @ {m})",
    "einsum": "jnp.einsum('ni,ij,nj->ni', {a}, {m}, {b})",
    "scale": "{a} * {w} + {v}",
    "where": "jnp.where({a} > 0.3, {a}, {w})",
    "where_nan": "jnp.where({a} > 1.9, jnp.nan, {b})",
    "inf": "jnp.where({a} < -1.9, -jnp.inf, {b})",
    "nan_to_num": "jnp.nan_to_num({a}, nan=0.5, posinf=2.0, neginf=-2.0)",
    "norm": "({a} - {a}.mean(-1, keepdims=True)) * lax.rsqrt({a}.var(-1, keepdims=True) + 0.1)",
    "logsumexp": "{a} - jax.nn.logsumexp({a}, -1, keepdims=True)",
    "median": "{a} - jnp.median({b}, -1, keepdims=True)",
    "take": "{a}[:, jnp.array([3, 0, 1, 1])]",
    "at_add": "{a}.at[:, 1].add({b}[:, 2])",
    "at_set": "{a}.at[:, :2].set({w}[:2])",
    "reverse": "{a}[:, ::-1] - {b}",
    "pad": "jnp.pad({a}, ((0, 0), (1, 0)))[:, :4]",
    "roll": "jnp.roll({a}, 1, 1) * {b}",
    "concat": "jnp.concatenate([{a}[:, :2], {b}[:, 2:]], 1)",
    "reshape": "{a}.reshape(-1, 2, 2).swapaxes(1, 2).reshape(-1, 4)",
    "repeat": "jnp.repeat({a}[:, None], 2, 1).sum(1)",
    "clip": "jnp.clip({a}, -1, jnp.abs({w}))",
    "floor": "jnp.floor(x * 4).astype(x.dtype) / 4 + {a} * 0",
    "integers": "(x * 3).astype(jnp.int32).astype(x.dtype) + {a}",
    "bf16": "{a}.astype(jnp.bfloat16).astype({a}.dtype)",
    "one_hot": "jax.nn.one_hot(y, 4, dtype={a}.dtype) * {a}",
    "embed": "{m}[y] + {a}",
    "map": "lax.map(lambda r: jnp.sin(r) * {w}, {a})",
    "map_sort": "jax.vmap(lambda r, s: jnp.interp(r, jnp.sort(s), {w}.astype(jnp.float32)))("
    "{a}.astype(jnp.float32), {b}.astype(jnp.float32)).astype({a}.dtype)",
    "solve": "jax.vmap(lambda r: jnp.linalg.solve(jnp.outer(r, r) + 4 * jnp.eye(4), {w}.astype("
    "jnp.float32)))({a}.astype(jnp.float32)).astype({a}.dtype)",
    "scan": "jax.vmap(lambda r: lax.scan(lambda k, e: (k * 0.5 + e, jnp.tanh(k)), r[0], r)[1])("
    "{a})",
    "while": "jax.vmap(lambda r: lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.sin(s[0]) + {w},"
    " s[1] + 1), (r, 0))[0])({a})",
    "while_of_row": "jax.vmap(lambda r, k: lax.while_loop(lambda s: s[1] < k, lambda s: "
    "(jnp.cos(s[0]), s[1] + 1), (r, 0))[0])({a}, y)",
    "fori": "lax.fori_loop(0, 3, lambda i, r: r * 0.5 + {b}, {a})",
    "cond": "jax.vmap(lambda r: lax.cond(r[0] > 0, lambda r: r * 2, lambda r: r - {w}, r))({a})",
    "switch": "jax.vmap(lambda r, k: lax.switch(k, [jnp.sin, jnp.cos, lambda r: -r], r))({a}, y)",
    "scan_of_weights": "lax.scan(lambda k, row: (jnp.tanh(k * row), None), {a}, {m})[0]",
    "jit": "jax.jit(lambda p, q: p - 0.5 * q)({a}, {b})",
    "checkpoint": "jax.checkpoint(lambda p, q: jnp.sin(p) * q)({a}, {b})",
    "custom_vjp": "halved({a})",
    "custom_jvp": "jax.nn.relu({a}) + jax.nn.silu({b})",
    "grad_of_row": "jax.vmap(jax.grad(lambda r: (jnp.tanh(r) ** 2 * {w}).sum()))({a})",
    "jvp_of_row": "jax.jvp(jnp.sin, ({a},), ({b},))[1]",
    "hessian_of_row": "jax.vmap(lambda r: jax.hessian(lambda s: (jnp.sin(s) * s[::-1]).sum())(r)"
    " @ {w})({a})",
    "associative_scan": "lax.associative_scan(jnp.maximum, {a}, axis=1)",
    "conv": "lax.conv_general_dilated({a}[:, None], {m}[:2, None, :3], (1,), 'SAME').mean(1)",
    "stop_gradient": "{a} + lax.stop_gradient({b})",
    "key_of_row": "jax.vmap(lambda r, k: r + jax.random.normal(jax.random.fold_in("
    "jax.random.key(3), k), (4,), r.dtype))({a}, y)",
}

# From the rows of all replicas, an array of shape [4] that is equal on all of them.
OVER_ROWS = {
    "sum": "c.sum({a}.sum(0))",
    "mean": "c.sum({a}.sum(0)) / n",
    "squares": "c.sum({{'s': ({a} ** 2).sum(0), 'p': ({a} * {b}).sum(0)}})['p'] / n",
    "variance": "c.sum((({a} - c.sum({a}.sum(0)) / n) ** 2).sum(0)) / n",
    "max": "c.max(jnp.max({a}, 0, initial=-9))",
    "min": "-c.max(jnp.max(-{a}, 0, initial=-9))",
    "any": "c.max(({a} > 1).any(0).astype(jnp.int32)).astype({a}.dtype)",
    "count": "c.sum(({a} > 0).sum(0)).astype({a}.dtype)",
    "nan_count": "c.sum(jnp.isnan({a}).sum(0)).astype({a}.dtype)",
    "masked_mean": "c.sum(jnp.where({a} > 0, {a}, 0).sum(0)) / jnp.maximum(c.sum(({a} > 0).sum(0)),"
    " 1).astype({a}.dtype)",
    "sorted": "jnp.sort(c.gather({a}), 0)[0]",
    "median": "jnp.median(c.gather({a}), 0)",
    "cumsum": "jnp.cumsum(c.gather({a}), 0)[-1]",
    "argmax": "jnp.argmax(c.gather({a}), 0).astype({a}.dtype)",
    "first": "c.gather({a})[0]",
    "pairs": "(c.gather({a}) @ c.gather({b}).T).sum(0)[:1] * jnp.ones(4, {a}.dtype)",
    "matrix": "c.sum({a}.T @ {b})[1] / n",
    "segments": "c.sum(jax.ops.segment_sum({a}, y, 3))[1]",
    "histogram": "c.sum(jnp.bincount(y, length=4)).astype({a}.dtype)",
    "scan_of_sums": "lax.scan(lambda k, _: (jnp.tanh(c.sum(({a} * k).sum(0)) / n), k), {w}, None,"
    " length=3)[0]",
    "fori_of_sums": "lax.fori_loop(0, 2, lambda i, k: k * 0.5 + c.sum(jnp.sin({a} + k).sum(0)) / n,"
    " {w})",
    "while_of_sums": "lax.while_loop(lambda s: s[1] < 2, lambda s: (c.sum(({a} * s[0]).sum(0)) / n,"
    " s[1] + 1), ({w}, 0))[0]",
    "cond_of_sums": "lax.cond({w}[0] > 0, lambda: c.sum({a}.sum(0)) / n, lambda: {v})",
    "switch_of_sums": "lax.switch(jnp.argmax({w}[:2]), [lambda r: c.sum(r.sum(0)) / n, lambda r:"
    " c.max(jnp.max(r, 0, initial=-9))], {a})",
    "jit_of_sums": "jax.jit(lambda r: c.sum(r.sum(0)) / n)({a})",
    "checkpoint_of_sums": "jax.checkpoint(lambda r: c.sum(jnp.sin(r).sum(0)) / n)({a})",
    "grad_of_sum": "c.sum(jax.grad(lambda k: (jnp.tanh({a} * k) ** 2).sum() / n)({w}))",
    "jvp_of_sum": "c.sum(jax.jvp(lambda k: jnp.sin({a} * k).sum(0), ({w},), ({v},))[1]) / n",
    "hvp": "c.sum(jax.jvp(jax.grad(lambda k: (jnp.tanh({a} * k) ** 2).sum() / n), ({w},), ({v},))"
    "[1])",
    "grad_of_grad": "c.sum(jax.grad(lambda k: (jax.grad(lambda j: (jnp.sin({a} * j) ** 2).sum() /"
    " n)(k) * {v}).sum())({w}))",
    "hessian": "c.sum(jax.hessian(lambda k: (jnp.tanh({a} * k) ** 2).sum() / n)({w}))[0]",
    "jacrev": "c.sum(jax.jacrev(lambda k: (jnp.tanh({a}) * k ** 2).sum(0) / n)({w}))[0]",
    "grad_through_sum": "c.sum(jax.grad(lambda k: (({a} - c.sum(({a} * k).sum(0)) / n) ** 2).sum()"
    " / n)({w}))",
    "grad_through_gather": "c.sum(jax.grad(lambda k: (({a} * k) @ c.gather({b} * k).T).sum() / n"
    " ** 2)({w}))",
    "inner_update": "c.sum(jax.grad(lambda k: (jnp.tanh({a} * (k - 0.1 * c.sum(jax.grad(lambda j:"
    " (jnp.sin({b} * j) ** 2).sum() / n)(k)))) ** 2).sum() / n)({w}))",
    "scan_over_grads": "lax.scan(lambda k, _: (k - 0.1 * c.sum(jax.grad(lambda j: (({a} * j - {b})"
    " ** 2).sum() / n)(k)), None), {w}, None, length=2)[0]",
}

# From arrays that are equal on all replicas, another one of shape [4].
OF_EQUAL = {
    "sin": "jnp.sin({w}) * {v}",
    "matvec": "jnp.tanh({m} @ {w})",
    "sort": "jnp.sort({w})",
    "cumsum": "jnp.cumsum({w}) - {v}",
    "where": "jnp.where({w} > {v}, {w}, -{v})",
    "nan": "jnp.where({w} > 1.5, jnp.nan, {v})",
    "scan": "lax.scan(lambda k, row: (jnp.tanh(row @ k) + {v}, None), {w}, {m}[:, None].repeat("
    "4, 1))[0]",
    "while": "lax.while_loop(lambda s: s[1] < 3, lambda s: (jnp.cos(s[0]), s[1] + 1), ({w}, 0))[0]",
    "cond": "lax.cond({w}[0] > {v}[0], lambda: jnp.sin({w}), lambda: {v} * 2)",
    "random": "{w} + jax.random.normal(jax.random.key(1), (4,), {w}.dtype)",
    "grad": "jax.grad(lambda k: (jnp.sin(k) * {v}).sum())({w})",
    "eigh": "jnp.linalg.eigvalsh(jnp.outer({w}, {w}).astype(jnp.float32) + jnp.diag("
    "jnp.arange(4.0))).astype({w}.dtype)",
    "inf": "{w} / jnp.maximum({v} * 0 + 1, 0.0) + jnp.where({w} > 1.8, jnp.inf, 0)",
    "checkpoint": "jax.checkpoint(jnp.sin)({w}) + {v}",
}
