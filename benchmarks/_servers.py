"""Arms of the rows on parameter servers: workers with a server, workers alone, and the queue."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from benchmarks._loop import Loop
from jaxdist._parameter_server import ClusterCoordinator, ParameterServerStrategy
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver

WORKERS = 2
_RATE = 0.05
_WIDTHS = (784, 512, 512, 256, 128, 10)


def train_with_a_server(batch: int) -> Loop:
    """Closures on two workers, each of which changes the 10 variables of one server."""
    strategy = _make_strategy()
    coordinator = ClusterCoordinator(strategy)
    images, labels = _make_batch(batch)
    with strategy.scope():
        variables = [jaxdist.Variable(x) for x in _make_parameters()]
    first = float(_find_loss([v.value() for v in variables], images, labels))

    def step(images: Any, labels: Any) -> Any:
        own = [v.value() for v in variables]
        loss, grads = jax.value_and_grad(_find_loss)(own, images, labels)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(_RATE * grad, read_value=False)
        return loss

    last: list[Any] = []

    def loop(steps: int) -> None:
        last[:] = [coordinator.schedule(step, (images, labels)) for _ in range(steps)]
        coordinator.join()

    def facts() -> dict[str, Any]:
        counts = coordinator.statistics()
        has_learned = float(last[-1].fetch()) < first
        return {"has all": counts.applied == counts.scheduled, "has learned": has_learned}

    return Loop(loop, facts=facts)


def compute_in_threads(batch: int) -> Loop:
    """The same gradients in as many threads, which exchange nothing."""
    images, labels = _make_batch(batch)
    parameters = [jnp.asarray(x) for x in _make_parameters()]
    find = jax.jit(jax.value_and_grad(_find_loss))
    threads = ThreadPoolExecutor(WORKERS)

    def work(steps: int) -> None:
        for _ in range(steps):
            jax.block_until_ready(find(parameters, images, labels))

    def loop(steps: int) -> None:
        shares = [steps // WORKERS + (n < steps % WORKERS) for n in range(WORKERS)]
        list(threads.map(work, shares))

    return Loop(loop)


def schedule_nothing() -> Loop:
    """Calls of `schedule` with an empty function; their results are waited for between bursts."""
    coordinator = ClusterCoordinator(_make_strategy())

    def loop(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(_do_nothing)

    return Loop(loop, prepare=lambda _: coordinator.join())


def submit_nothing() -> Loop:
    """Calls of `submit` of a thread pool with an empty function."""
    threads = ThreadPoolExecutor(WORKERS)
    waiting: list[Any] = []

    def loop(steps: int) -> None:
        waiting.extend(threads.submit(_do_nothing) for _ in range(steps))

    def wait(_: int) -> None:
        for future in waiting:
            future.result()
        waiting.clear()

    return Loop(loop, prepare=wait)


def _do_nothing() -> None:
    return None


def _make_strategy() -> ParameterServerStrategy:
    jobs = {"chief": 1, "ps": 1, "worker": WORKERS}
    spec = {job: [f"{job}{n}:0" for n in range(count)] for job, count in jobs.items()}
    resolver = SimpleClusterResolver(
        ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="local"
    )
    return ParameterServerStrategy(resolver)


def _make_parameters() -> list[np.ndarray]:
    """Return kernels and biases of 5 layers: 10 arrays, 3.3 MB."""
    rng = np.random.default_rng(0)
    made: list[np.ndarray] = []
    for into, out in itertools.pairwise(_WIDTHS):
        made += [rng.normal(0, into**-0.5, (into, out)).astype("float32"), np.zeros(out, "float32")]
    return made


def _make_batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(rows, _WIDTHS[0])).astype("float32")
    return images, rng.integers(0, _WIDTHS[-1], rows).astype("int32")


def _find_loss(parameters: list[Any], images: Any, labels: Any) -> Any:
    x = images
    for n in range(0, len(parameters), 2):
        x = x @ parameters[n] + parameters[n + 1]
        x = jax.nn.relu(x) if n < len(parameters) - 2 else x
    logits = jax.nn.log_softmax(x)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))
