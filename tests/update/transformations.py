"""Every transformation that the installed optax ships, made with arguments that exercise it."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

Make = Callable[[], Any]

LEARNING_RATE = 0.02


def _kernels(tree: Any) -> Any:
    """Labels: matrices, and the rest."""
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) > 1 else "other", tree)


def _is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)


def _every_second(step: Any, *_: Any, **__: Any) -> Any:
    return step % 2 == 0


def _lr(name: str, **more: Any) -> Make:
    return lambda: getattr(optax, name)(LEARNING_RATE, **more)


def _scaled(name: str) -> Make:
    return lambda: optax.chain(getattr(optax, name)(), optax.scale(-LEARNING_RATE))


def _contrib(name: str, *args: Any, **more: Any) -> Make:
    return lambda: getattr(contrib, name)(*args, **more)


SCHEDULE = optax.exponential_decay(LEARNING_RATE, 2, 0.9)

# Optimizers, by learning rate.
ALIASES = """
    adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam
    nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd
    sign_sgd signum sm3 yogi
""".split()
# Transformations that need no argument, and are steps of descent when scaled.
BARE = """
    centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta
    scale_by_adam scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief scale_by_lion
    scale_by_distance_over_gradients scale_by_factored_rms scale_by_novograd
    scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms scale_by_radam
    scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio
    scale_by_yogi set_to_zero zero_nans
""".split()

CASES: dict[str, Make] = {
    **{n: _lr(n) for n in ALIASES},
    **{n: _scaled(n) for n in BARE if hasattr(optax, n)},
    "sgd with Nesterov momentum": _lr("sgd", momentum=0.9, nesterov=True),
    "adam with bf16 moments": _lr("adam", mu_dtype=jnp.bfloat16),
    "adamw of matrices": _lr("adamw", weight_decay=0.1, mask=_is_matrix),
    "adam by schedule": lambda: optax.adam(SCHEDULE),
    "adafactor": _lr("adafactor", min_dim_size_to_factor=4, multiply_by_parameter_scale=True),
    "adafactor with momentum": _lr("adafactor", min_dim_size_to_factor=4, momentum=0.9),
    "optimistic_adam": lambda: optax.optimistic_adam(LEARNING_RATE),
    "noisy_sgd": lambda: optax.noisy_sgd(LEARNING_RATE, key=7),
    "polyak_sgd": lambda: optax.polyak_sgd(1.0),
    "scale_by_polyak": lambda: optax.scale_by_polyak(),
    "lbfgs": lambda: optax.lbfgs(memory_size=3),
    "lbfgs without a line search": lambda: optax.lbfgs(LEARNING_RATE, linesearch=None),
    "scale_by_lbfgs": lambda: optax.chain(optax.scale_by_lbfgs(3), optax.scale(-LEARNING_RATE)),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)
    ),
    "scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)
    ),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.05),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1, mask=_is_matrix),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=3),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(LEARNING_RATE), 3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(LEARNING_RATE)),
    "clip": lambda: optax.clip(0.05),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.05),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.sgd(LEARNING_RATE), _every_second),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.sgd(LEARNING_RATE), _every_second
    ),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(optax.adam(LEARNING_RATE)),
    "freeze": lambda: optax.freeze({"w": True, "v": False, "b": False, "s": True, "o": False}),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adamw)(
        LEARNING_RATE
    ),
    "lookahead": lambda: optax.lookahead(optax.adam(LEARNING_RATE), 2, 0.5),
    "masked": lambda: optax.masked(optax.adam(LEARNING_RATE), _is_matrix),
    "measure_with_ema": lambda: optax.monitor(
        {"norm": optax.measure_with_ema(lambda x: optax.tree.norm(x), 0.9)}
    ),
    "monitor": lambda: optax.monitor({"norm": optax.tree.norm}),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(LEARNING_RATE), "other": optax.sgd(LEARNING_RATE)}, _kernels
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(LEARNING_RATE), 2),
    "MultiSteps that skips": lambda: optax.MultiSteps(
        optax.sgd(LEARNING_RATE), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip(1.0)), ("adam", optax.adam(LEARNING_RATE))
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.lamb(LEARNING_RATE), "other": optax.set_to_zero()}, _kernels
    ),
    "scale": lambda: optax.scale(-0.1),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(SCHEDULE),
    "scale_by_schedule": lambda: optax.scale_by_schedule(SCHEDULE),
    "scale_by_rprop": lambda: optax.scale_by_rprop(LEARNING_RATE),
    "selective_transform": lambda: optax.selective_transform(
        optax.sgd(LEARNING_RATE), freeze_mask={k: k == "w" for k in "wvbso"}
    ),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "stateless": lambda: optax.stateless(
        lambda g, p: jax.tree.map(lambda x: -0.01 * jnp.sign(x), g)
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda g, p: -0.01 * g - 0.001 * jnp.asarray(p)
    ),
    "trace": lambda: optax.trace(0.9, nesterov=True),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.sgd(LEARNING_RATE)),
    # contrib
    "acprop": _contrib("acprop", LEARNING_RATE),
    "ademamix": _contrib("ademamix", LEARNING_RATE),
    "adopt": _contrib("adopt", LEARNING_RATE),
    "cocob": _contrib("cocob"),
    "dadapt_adamw": _contrib("dadapt_adamw"),
    "dog": _contrib("dog"),
    "dowg": _contrib("dowg"),
    "galore": _contrib("galore", LEARNING_RATE, rank=2, update_proj_gap=2),
    "scale_by_galore": _contrib("scale_by_galore", rank=2, update_proj_gap=2),
    "madgrad": _contrib("madgrad", LEARNING_RATE),
    "mechanize": lambda: contrib.mechanize(optax.adam(LEARNING_RATE)),
    "momo": _contrib("momo", LEARNING_RATE),
    "momo_adam": _contrib("momo_adam", LEARNING_RATE),
    "muon": _contrib("muon", LEARNING_RATE),
    "normalize": _contrib("normalize"),
    "prodigy": _contrib("prodigy"),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(LEARNING_RATE), contrib.reduce_on_plateau(patience=1)
    ),
    "sam": lambda: contrib.sam(
        optax.sgd(LEARNING_RATE), optax.chain(contrib.normalize(), optax.sgd(0.01)), sync_period=2
    ),
    "scale_by_acprop": _contrib("scale_by_acprop"),
    "scale_by_ademamix": _contrib("scale_by_ademamix"),
    "scale_by_adopt": _contrib("scale_by_adopt"),
    "scale_by_cocob": _contrib("scale_by_cocob"),
    "scale_by_madgrad": _contrib("scale_by_madgrad", LEARNING_RATE),
    "scale_by_simplified_ademamix": _contrib("scale_by_simplified_ademamix"),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(LEARNING_RATE), LEARNING_RATE),
    "schedule_free_adamw": _contrib("schedule_free_adamw", LEARNING_RATE),
    "schedule_free_sgd": _contrib("schedule_free_sgd", LEARNING_RATE),
    "simplified_ademamix": _contrib("simplified_ademamix", LEARNING_RATE),
    "sophia": _contrib("sophia", LEARNING_RATE),
    "hutchinson_estimator_diag_hessian": _contrib("hutchinson_estimator_diag_hessian"),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(LEARNING_RATE)),
}

# They leave the sign or the size of gradients as they are, and would climb.
CLIMBING = """
    adaptive_grad_clip add_decayed_weights add_noise apply_every clip clip_by_block_rms
    clip_by_global_norm conditionally_transform ema masked measure_with_ema monitor snapshot trace
    normalize scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob scale_by_galore
    scale_by_madgrad scale_by_simplified_ademamix
    hutchinson_estimator_diag_hessian
""".split()


def made(name: str) -> optax.GradientTransformationExtraArgs:
    """The transformation of a case; it goes down."""
    tx = CASES[name]()
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if name in CLIMBING:
        tx = optax.chain(tx, optax.scale(-LEARNING_RATE))
    return optax.with_extra_args_support(tx)


# The extra arguments that they are given besides those of `optax.value_and_grad_from_state`.
VALUE_FN = {"lbfgs", "scale_by_backtracking_linesearch", "scale_by_zoom_linesearch"}
VALUE = {"polyak_sgd", "scale_by_polyak", "momo", "momo_adam", "reduce_on_plateau"}
OBJECTIVE = {"sophia", "hutchinson_estimator_diag_hessian"}
# optax's own fails for parameters without a dim.
MATRICES = {"sm3", "scale_by_sm3"}

# Gradients of each example by itself; a replica clips and averages its own before the update.
PART_OF_ANOTHER = {"scale_by_muon"}  # of muon, which tells it what is a matrix
PER_EXAMPLE = {"differentially_private_aggregate", "dpsgd"}


def shipped() -> Iterator[str]:
    """The names of optax that make a transformation, by what their signature returns."""
    for module in (optax, contrib, optax.transforms):
        for name, value in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(value):
                continue
            returned = str(inspect.signature(value).return_annotation)
            if "GradientTransformation" in returned:
                yield name


def parts() -> set[str]:
    """The cases that stand in another one: an optimizer is made of them, as its code says."""
    makers = [
        value
        for module in (optax, contrib)
        for name, value in vars(module).items()
        if name in CASES and not name.startswith("scale_by_") and inspect.isfunction(value)
    ]
    return {n for f in makers for n in f.__code__.co_names if n.startswith("scale_by_")} & set(
        CASES
    )


def covered() -> set[str]:
    """The names that a case is made for."""
    return {name.split(" ")[0] for name in CASES} | PER_EXAMPLE | PART_OF_ANOTHER
