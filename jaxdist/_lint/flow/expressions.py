"""Reads expressions, and the facts about them."""

import ast
from collections.abc import Sequence

from jaxdist._lint.flow.facts import (
    Averaged,
    Batch,
    Checkpoints,
    Dataset,
    Events,
    Fact,
    Function,
    Gradient,
    LocalMean,
    Metric,
    MetricUpdate,
    Parts,
    Reduced,
    Run,
    Scope,
    Strategy,
    Variable,
    depends_on_batch,
    join,
    map_leaves,
)
from jaxdist._lint.flow.means import after_operator, read_division, read_mean, read_reduction
from jaxdist._lint.flow.objects import read_object
from jaxdist._lint.names import Names, written

_ABOUT_SHAPES = {"shape", "dtype", "ndim", "size", "sharding", "name", "trainable"}
_READS = {"value", "read_value", "numpy", "item"}
_PASSES_ELEMENTS = {"iter", "list", "tuple", "islice", "reversed", "track"}
_RUNS_PARTS = {"jaxdist.nn.pipeline_loss", "jaxdist.nn.experts"}
_RUNS = {"run", "experimental_run_v2", "call_for_each_replica"}
_JOINT = _RUNS | {"reduce", "gather"}
_JOINT_OF_JAX = {"process_allgather", "sync_global_devices", "broadcast_one_to_all", "assert_equal"}
_JOINT_OF_LAX = {"psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "ppermute"}
# Functions whose result is the same as their argument, as far as rules are concerned.
_SAME = {"jit", "function", "multi_step", "accumulate_gradients", "checkpoint", "remat", "float"}
_UPDATES_METRIC = {"update", "update_state"}
_KEEPS = {"astype", "reshape", "squeeze"}
_TREE_MAPS = {
    "jax.tree.map",
    "jax.tree_util.tree_map",
    "jax.tree_map",
    "tensorflow.nest.map_structure",
}


class Expressions:
    """Reads expressions; a subclass reads functions."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.events = Events()
        self.scope = Scope({})
        self.depth_of_steps = 0
        self.knows_strategies = bool(names.modules & {"jaxdist", "tensorflow"})

    def call(
        self, function: Function, given: Sequence[Fact | None], named: dict[str, Fact | None]
    ) -> Fact | None:
        """Return the fact about the result of a function of the program."""
        raise NotImplementedError

    def read(self, node: ast.expr | None) -> Fact | None:
        """Return the fact about an expression, and note its events."""
        match node:
            case None | ast.Constant():
                return None
            case ast.Name(id=name):
                return self.scope.find(name)
            case ast.Call():
                return self.read_call(node)
            case ast.Attribute():
                return self._read_attribute(node)
            case ast.Tuple() | ast.List():
                if any(isinstance(e, ast.Starred) for e in node.elts):
                    return self._read_children(node)
                return Parts(tuple(enumerate([self.read(e) for e in node.elts])))
            case ast.Dict():
                keys = [getattr(key, "value", None) for key in node.keys]
                return Parts(tuple(zip(keys, map(self.read, node.values), strict=True)))
            case ast.BinOp():
                left, right = self.read(node.left), self.read(node.right)
                return read_division(node, left) or after_operator(node.op, left, right)
            case ast.Subscript():
                return self._read_subscript(node)
            case ast.IfExp():
                self.note_test(node.test)
                return join(self.read(node.body), self.read(node.orelse))
            case ast.NamedExpr(target=ast.Name(id=name)):
                self.scope.names[name] = self.read(node.value)
                return self.scope.names[name]
            case ast.Lambda():
                return Function(node, self.scope)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._read_comprehension(node)
        return self._read_children(node)

    def _read_children(self, node: ast.AST) -> Fact | None:
        children = [self.read(c) for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        return Batch() if any(map(depends_on_batch, children)) else None

    def _read_attribute(self, node: ast.Attribute) -> Fact | None:
        found = self.scope.find(ast.unparse(node))
        if found is not None:
            return found
        owner = self.read(node.value)
        if node.attr in _ABOUT_SHAPES:
            return None
        if isinstance(owner, Variable):
            return owner if node.attr in _READS else None
        return Batch() if depends_on_batch(owner) else None

    def _read_subscript(self, node: ast.Subscript) -> Fact | None:
        owner = self.read(node.value)
        self.read(node.slice)
        if isinstance(owner, Parts):
            key = getattr(node.slice, "value", self)
            return owner.find(key) if key is not self else None
        if isinstance(owner, Reduced | Averaged):
            return owner
        return Batch() if depends_on_batch(owner) else None

    def _read_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Fact | None:
        outer, self.scope = self.scope, Scope({}, self.scope)
        for part in node.generators:
            self.bind(part.target, self.read_element(part.iter))
            for test in part.ifs:
                self.note_test(test)
        element = self.read(node.value if isinstance(node, ast.DictComp) else node.elt)
        self.scope = outer
        return element if isinstance(element, Reduced) else only_batch(element)

    def read_element(self, node: ast.expr) -> Fact | None:
        """Return the fact about an element of an iterable."""
        if isinstance(node, ast.Call) and written(node) in {"enumerate", "zip"}:
            elements = [self.read_element(argument) for argument in node.args]
            return Parts(
                tuple(enumerate(([None] if written(node) == "enumerate" else []) + elements))
            )
        if isinstance(node, ast.Call) and written(node) in _PASSES_ELEMENTS and node.args:
            return self.read_element(node.args[0])
        whole = self.read(node)
        if isinstance(whole, Dataset):
            return Batch() if whole.is_uneven else None
        return whole if isinstance(whole, Reduced | Batch) else None

    def bind(self, target: ast.AST, fact: Fact | None) -> None:
        """Assign the fact about a value to a target of an assignment."""
        match target:
            case ast.Name(id=name):
                self.scope.names[name] = fact
                if isinstance(fact, Variable):
                    self.events.variables.add(name)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for position, element in enumerate(elements):
                    part = fact.find(position) if isinstance(fact, Parts) else fact
                    same = isinstance(part, Reduced | Batch | Averaged | LocalMean) or isinstance(
                        fact, Parts
                    )
                    self.bind(element, part if same else None)
            case ast.Starred(value=inner):
                self.bind(inner, only_batch(fact))
            case ast.Attribute():
                self.scope.names[ast.unparse(target)] = fact
            case ast.Subscript(value=ast.Name(id=name)):
                self.scope.names[name] = only_batch(join(self.scope.find(name), fact))

    def note_test(self, node: ast.expr) -> None:
        """Read a condition that Python evaluates."""
        self.read(node)

    def read_call(self, node: ast.Call) -> Fact | None:
        """Return the fact about the result of a call, and note its events."""
        name = self.names.find(node.func, self.scope)
        owner = self._read_owner(node) if not name else None
        arguments = [*node.args, *(k.value for k in node.keywords)]
        read = {argument: self.read(argument) for argument in arguments}
        facts: dict[object, Fact | None] = dict(enumerate(read[a] for a in node.args))
        facts.update((k.arg, read[k.value]) for k in node.keywords)
        self._note_joint_call(node, name, owner)
        self._note_metric_update(node, owner, read)
        function = facts.get(0)
        if isinstance(owner, Strategy) and written(node) in _RUNS:
            return self._read_run(node, owner, facts)
        if name in _TREE_MAPS and isinstance(function, Function):
            return self.call(function, [facts[i] for i in range(1, len(node.args))], {})
        if name in _RUNS_PARTS:
            self.events.parts += [f for f in facts.values() if isinstance(f, Function)]
        reduction = read_reduction(node, name, owner, id(self.scope), read)
        if reduction is not None:
            self.events.reductions.append(reduction)
            return map_leaves(reduction.apply, reduction.before)
        return self._read_other_call(node, name, owner, facts)

    def _read_owner(self, node: ast.Call) -> Fact | None:
        """Return the fact about `x` in `x.method()`; a strategy is also recognized by its name."""
        if not isinstance(node.func, ast.Attribute):
            return None
        owner = self.read(node.func.value)
        is_named = "strategy" in written(node.func.value).lower()
        if owner is None and is_named and self.knows_strategies:
            is_object = isinstance(node.func.value, ast.Name | ast.Attribute)
            return Strategy("") if is_object else None
        return owner

    def _note_joint_call(self, node: ast.Call, name: str, owner: Fact | None) -> None:
        last = written(node)
        is_local = isinstance(owner, Strategy) and _is_local(owner)
        of_strategy = isinstance(owner, Strategy) and last in _JOINT and not is_local
        of_context = last in {"all_reduce", "all_gather"} and "get_replica_context" in ast.unparse(
            node.func
        )
        of_library = (last in _JOINT_OF_JAX and "multihost_utils" in name) or (
            name == f"jax.lax.{last}" and last in _JOINT_OF_LAX
        )
        saves = isinstance(owner, Checkpoints) and last == "save"
        if of_strategy or of_context or of_library or saves:
            self.events.joint_calls[id(node)] = ast.unparse(node.func)

    def _note_metric_update(
        self, node: ast.Call, owner: Fact | None, read: dict[ast.expr, Fact | None]
    ) -> None:
        """Note `metric.update(loss=loss)` and `metric.update_state(loss)`."""
        if written(node) not in _UPDATES_METRIC or not isinstance(node.func, ast.Attribute):
            return
        # A dict has an `update`, too.
        if isinstance(owner, Metric) or "metric" in ast.unparse(node.func.value).lower():
            self.events.metric_updates += [MetricUpdate(node, *item) for item in read.items()]

    def _read_run(
        self, node: ast.Call, strategy: Strategy, facts: dict[object, Fact | None]
    ) -> Fact | None:
        step = facts.get(0, facts.get("fn"))
        function = step if isinstance(step, Function) else None
        self.events.runs.append(Run(node, strategy, function))
        if function is None:
            return None
        given, named = facts.get(1, facts.get("args")), facts.get(2, facts.get("kwargs"))
        positional = _read_arguments(node, given, function)
        by_name = {str(k): f for k, f in named.items} if isinstance(named, Parts) else {}
        self.depth_of_steps += 1
        result = self.call(function, positional, by_name)
        self.depth_of_steps -= 1
        return result

    def _read_other_call(
        self, node: ast.Call, name: str, owner: Fact | None, facts: dict[object, Fact | None]
    ) -> Fact | None:
        callee = self.scope.find(ast.unparse(node.func)) if not name else None
        if callee is None and not name and not isinstance(node.func, ast.Name | ast.Attribute):
            callee = self.read(node.func)
        if isinstance(callee, Function | Gradient):
            has_star = any(isinstance(a, ast.Starred) for a in node.args)
            positional = [] if has_star else [facts[i] for i in range(len(node.args))]
            by_name = {str(k): fact for k, fact in facts.items() if isinstance(k, str)}
            return self.apply(callee, positional, by_name)
        found = (
            self._read_wrapper(node, facts.get(0))
            or _read_method(node, owner)
            or read_mean(node, name, owner, facts)
            or read_object(node, name, owner, facts)
        )
        if found is not None:
            return found
        return Batch() if any(map(depends_on_batch, [owner, *facts.values()])) else None

    def _read_wrapper(self, node: ast.Call, first: Fact | None) -> Fact | None:
        """Return the fact about the result of functions that pass on their first argument."""
        last = written(node)
        if last in {"grad", "value_and_grad"} and isinstance(first, Function):
            has_aux = any(k.arg == "has_aux" for k in node.keywords)
            return Gradient(first, last == "value_and_grad", has_aux)
        if last == "gradient":  # of a tf.GradientTape
            return first if isinstance(first, Averaged | LocalMean) else only_batch(first)
        if last == "next" and isinstance(first, Dataset):
            return Batch() if first.is_uneven else None
        is_iterator = last == "iter" and isinstance(first, Dataset)
        return first if is_iterator or last in _SAME else None

    def apply(
        self,
        callee: Function | Gradient,
        given: Sequence[Fact | None],
        named: dict[str, Fact | None],
    ) -> Fact | None:
        """Return the fact about the result of a function, or about its gradient."""
        if isinstance(callee, Function):
            return self.call(callee, given, named)
        result = self.call(callee.function, given, named)
        loss = result.find(0) if callee.has_aux and isinstance(result, Parts) else result
        # The gradient of a reduced value must still be reduced.
        keeps = isinstance(loss, Averaged | LocalMean)
        gradient = loss if keeps else only_batch(loss)
        if callee.with_value:
            return Parts(((0, result), (1, gradient)))
        return gradient


def _read_arguments(
    node: ast.Call, given: Fact | None, function: Function
) -> Sequence[Fact | None]:
    """Return the facts about the arguments of a step."""
    if not isinstance(given, Batch):
        return [fact for _, fact in given.items] if isinstance(given, Parts) else []
    # The batch is the tuple of all arguments, `run(step, batch)`, or of the last ones,
    # `run(step, (state, *batch))`.
    named = [k.value for k in node.keywords if k.arg == "args"]
    written_as = [*node.args[1:2], *named][0]
    others = written_as.elts[:-1] if isinstance(written_as, ast.Tuple | ast.List) else []
    names = [*function.node.args.posonlyargs, *function.node.args.args]
    return [*[None] * len(others), *[given] * (len(names) - len(others))]


def _read_method(node: ast.Call, owner: Fact | None) -> Fact | None:
    """Return the fact about the result of a method of a value."""
    last = written(node)
    if last == "get_next" and isinstance(owner, Dataset):
        return Batch() if owner.is_uneven else None
    keeps = (isinstance(owner, Variable) and last in _READS) or (
        isinstance(owner, Reduced | Averaged) and last in _KEEPS
    )
    return owner if keeps else None


def _is_local(strategy: Strategy) -> bool:
    """Return whether the devices of a strategy may belong to one process."""
    return strategy.kind.startswith(("OneDevice", "Mirrored", "CentralStorage", "ParameterServer"))


def only_batch(fact: Fact | None) -> Fact | None:
    """Return `Batch` if a value depends on a batch, and drop all other facts about it."""
    return Batch() if depends_on_batch(fact) else None
