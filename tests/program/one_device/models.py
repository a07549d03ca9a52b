"""Models, losses and optimizers of random programs, as source."""

# A function of the parameters and of rows; lines of the body of `model(p, h)`.
PYTREES = {
    "dense": (
        "{'w': rand(1, 4, 8), 'b': rand(2, 8)}",
        "return jnp.tanh(h @ p['w'] + p['b'])[:, :4]",
    ),
    "mlp": (
        (
            "{'up': {'kernel': rand(1, 4, 8), 'bias': rand(2, 8)},"
            " 'down': {'kernel': rand(3, 8, 4), 'bias': rand(4, 4)}}"
        ),
        (
            "h = jax.nn.gelu(h @ p['up']['kernel'] + p['up']['bias'])\n"
            "return h @ p['down']['kernel'] + p['down']['bias']"
        ),
    ),
    "embedding": (
        "{'table': rand(1, 8, 4), 'scale': rand(2, 4)}",
        "return (jnp.take(p['table'], y, axis=0) + h) * p['scale']",
    ),
    "residual": (
        "[{'w': rand(i, 4, 4)} for i in range(1, 4)]",
        (
            "for layer in p:\n"
            "    h = h + jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, layer['w'])\n"
            "return h"
        ),
    ),
    "scanned": (
        "{'w': rand(1, 3, 4, 4), 'b': rand(2, 3, 4)}",
        "return lax.scan(lambda h, l: (jnp.tanh(h @ l['w'] + l['b']), None), h, c.whole(p))[0]",
    ),
    "attention": (
        "{'q': rand(1, 4, 4), 'k': rand(2, 4, 4), 'v': rand(3, 4, 4)}",
        (
            "s = h[:, :, None] * jnp.arange(1, 5, dtype=h.dtype)\n"
            "a = jax.nn.softmax((s @ p['q']) @ (s @ p['k']).swapaxes(1, 2), -1)\n"
            "return (a @ (s @ p['v'])).mean(1)"
        ),
    ),
    "centred": (
        "{'w': rand(1, 4, 4), 'g': rand(2, 4)}",
        (
            "h = h @ p['w']\nh = h - c.sum(h.sum(0)) / n\n"
            "return h * lax.rsqrt(c.sum((h ** 2).sum(0)) / n + 0.1) * p['g']"
        ),
    ),
    "recurrent": (
        "{'w': rand(1, 4, 4), 'u': rand(2, 4)}",
        (
            "w, u = c.whole(p['w']), c.whole(p['u'])\n"
            "return lax.fori_loop(0, 3, lambda i, s: jnp.tanh(s @ w + u), h)"
        ),
    ),
}

# Classes with the argument `rngs`; lines of the body of `__call__(self, h, y)`.
MODULES = {
    "linear": ("self.a = nnx.Linear(4, 4, rngs=rngs)", "return self.a(h)"),
    "mlp": (
        "self.up = nnx.Linear(4, 8, rngs=rngs)\nself.down = nnx.Linear(8, 4, rngs=rngs)",
        "return self.down(jax.nn.gelu(self.up(h)))",
    ),
    "layer_norm": (
        "self.a = nnx.Linear(4, 8, rngs=rngs)\nself.n = nnx.LayerNorm(8, rngs=rngs)",
        "return self.n(self.a(h))[:, :4]",
    ),
    "rms_norm": (
        "self.a = nnx.RMSNorm(4, rngs=rngs)\nself.b = nnx.Linear(4, 4, rngs=rngs)",
        "return self.b(self.a(h))",
    ),
    "group_norm": (
        "self.a = nnx.Linear(4, 8, rngs=rngs)\nself.n = nnx.GroupNorm(8, 2, rngs=rngs)",
        "return self.n(self.a(h))[:, 2:6]",
    ),
    "embed": ("self.e = nnx.Embed(8, 4, rngs=rngs)", "return self.e(y) * h"),
    "conv": (
        "self.a = nnx.Conv(1, 4, (3,), rngs=rngs)",
        "return jax.nn.relu(self.a(h[:, :, None])).mean(1)",
    ),
    "conv_transpose": (
        "self.a = nnx.ConvTranspose(1, 2, (2,), rngs=rngs)",
        "return self.a(h[:, :, None]).sum(-1)[:, :4]",
    ),
    "einsum": ("self.a = nnx.Einsum('ni,ij->nj', (4, 4), (4,), rngs=rngs)", "return self.a(h)"),
    "gru": (
        "self.a = nnx.RNN(nnx.GRUCell(1, 4, rngs=rngs))",
        "return self.a(h[:, :, None])[:, -1]",
    ),
    "attention": (
        "self.a = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)",
        "return self.a(h[:, None] * jnp.ones((2, 1), h.dtype)).mean(1)",
    ),
    "lora": ("self.a = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)", "return self.a(h)"),
    "sequential": (
        (
            "self.a = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), jax.nn.silu,"
            " nnx.Linear(8, 4, rngs=rngs))"
        ),
        "return h + self.a(h)",
    ),
    "remat": (
        "self.a = nnx.Linear(4, 4, rngs=rngs)",
        "return nnx.remat(lambda m, h: jnp.tanh(m(h)))(self.a, h)",
    ),
    "counting": (
        "self.a = nnx.Linear(4, 4, rngs=rngs)\nself.seen = nnx.BatchStat(jnp.zeros((), jnp.int32))",
        "self.seen[...] += c.sum(h.shape[0])\nreturn self.a(h)",
    ),
    "shared": (
        "self.a = nnx.Linear(4, 4, rngs=rngs)\nself.b = self.a",
        "return self.b(jnp.tanh(self.a(h)))",
    ),
    "moments": (
        "self.a = nnx.Linear(4, 4, rngs=rngs)\nself.mean = nnx.BatchStat(jnp.zeros(4))",
        (
            "mu = lax.stop_gradient(c.sum(h.sum(0)) / n)\n"
            "self.mean[...] = 0.9 * self.mean[...] + 0.1 * mu\nreturn self.a(h - mu)"
        ),
    ),
    "batch_norm": (
        (
            "self.a = nnx.Linear(4, 4, rngs=rngs)\n"
            "self.n = nnx.BatchNorm(4, axis_name=c.axis, use_fast_variance=False, rngs=rngs)"
        ),
        "return self.n(self.a(h))",
    ),
}

# A scalar of each row.
LOSSES = {
    "square": "((out - t) ** 2).mean(-1)",
    "huber": "optax.huber_loss(out, t).sum(-1)",
    "labels": "optax.softmax_cross_entropy_with_integer_labels(out, y)",
    "cosine": "optax.cosine_distance(out, t, epsilon=1e-3)",
    "hinge": "jnp.maximum(0.0, 1 - out * jnp.sign(t)).mean(-1)",
    "weighted": "jnp.where(y > 0, ((out - t) ** 2).mean(-1), 0.0)",
}

ELEMENTWISE = {
    "sgd": "optax.sgd(0.1)",
    "momentum": "optax.sgd(0.1, momentum=0.9, nesterov=True)",
    "adam": "optax.adam(0.01, eps=1e-3)",
    "adamw": "optax.adamw(0.01, eps=1e-3, weight_decay=0.1)",
    "amsgrad": "optax.amsgrad(0.01, eps=1e-3)",
    "rmsprop": "optax.rmsprop(0.01, eps=1e-3, momentum=0.5)",
    "adagrad": "optax.adagrad(0.1)",
    "adadelta": "optax.adadelta(0.1)",
    "nadam": "optax.nadam(0.01, eps=1e-3)",
    "adabelief": "optax.adabelief(0.01, eps=1e-3)",
    "yogi": "optax.yogi(0.01)",
    "schedule": "optax.sgd(optax.cosine_decay_schedule(0.1, 4))",
    "decayed": "optax.chain(optax.add_decayed_weights(0.01), optax.ema(0.9), optax.scale(-0.1))",
    "clip": "optax.chain(optax.clip(0.05), optax.adam(0.01, eps=1e-3))",
    "inject": "optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)",
    "apply_every": "optax.chain(optax.apply_every(2), optax.sgd(0.1))",
}
NOT_ELEMENTWISE = {
    "clip_norm": "optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01, eps=1e-3))",
    "clip_block": "optax.chain(optax.clip_by_block_rms(0.05), optax.sgd(0.1))",
    "adaptive_clip": "optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1))",
    "adafactor": "optax.adafactor(0.01, min_dim_size_to_factor=4)",
    "lamb": "optax.lamb(0.01, eps=1e-3)",
    "lars": "optax.lars(0.1)",
    "fromage": "optax.fromage(0.01)",
    "novograd": "optax.novograd(0.01, eps=1e-3)",
    "sm3": "optax.sm3(0.01)",
    "multi_steps": "optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()",
    "if_finite": "optax.apply_if_finite(optax.sgd(0.1), 2)",
    "centralize": "optax.chain(optax.centralize(), optax.sgd(0.1))",
    "unit": "optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1))",
    "muon": "optax.contrib.muon(0.01)",
    "schedule_free": "optax.contrib.schedule_free_sgd(0.1)",
    "trust": "optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.01))",
}

# How gradients of `loss_of(p)`, a sum over own rows divided by all rows, are made.
GRADIENTS = {
    "value_and_grad": "loss, grads = jax.value_and_grad(loss_of)(p)",
    "vjp": "loss, pull = jax.vjp(loss_of, p)\ngrads = pull(jnp.ones_like(loss))[0]",
    "checkpoint": "loss, grads = jax.value_and_grad(jax.checkpoint(loss_of))(p)",
    "jit": "loss, grads = jax.jit(jax.value_and_grad(loss_of))(p)",
    "linear": "loss, grads = jax.value_and_grad(lambda p: 0.5 * loss_of(p))(p)",
}
# These differentiate twice.
SECOND_ORDER = {
    "penalty": "loss, grads = jax.value_and_grad(lambda p: loss_of(p) + 0.1 * (jax.grad(lambda h:"
    " model(p, h).sum())({a}) ** 2).sum() / n)(p)",
    "hvp": "loss, grads = jax.value_and_grad(loss_of)(p)\n"
    "grads = jax.jvp(jax.grad(loss_of), (p,), (jax.tree.map(jnp.sin, p),))[1]",
    "grad_norm": "loss, grads = jax.value_and_grad(lambda p: sum((g ** 2).sum() for g in"
    " jax.tree.leaves(c.whole(c.sum(jax.grad(loss_of)(p))))) * x.shape[0] / n)(p)",
    "maml": "loss, grads = jax.value_and_grad(lambda p: loss_of(jax.tree.map(lambda w, g: w - 0.1 *"
    " g, p, c.sum(jax.grad(loss_of)(p)))))(p)",
}
