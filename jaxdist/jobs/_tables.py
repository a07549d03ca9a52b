"""`Table`: a large variable of a model that optimizers and gradients do not see."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jaxdist._called import called
from jaxdist._validate import check_callable


class Table:
    """A variable; each step reads and changes only some of its rows.

    Use it as an attribute of an NNX module. NNX does not look into it: a `jaxdist.Variable`
    would be a leaf of the model, and its whole value would move with the model.

    Args:
        make: Makes the variable, in the scope of the strategy. Given `shape` and `dtype`,
            servers compute the first values of their parts themselves.

    Attributes:
        variable: The variable, from `create` on; the steps of the task use it.

    Raises:
        ArgumentTypeError: `make` is not a function.

    Example:
        >>> class Net(nnx.Module):
        ...     def __init__(self):
        ...         self.table = Table(lambda: jaxdist.Variable(np.zeros((1024, 8))))
        >>> net = Net()
        >>> nnx.state(net)
        State({})
        >>> net.table.create()
        >>> net.table.variable.shape
        (1024, 8)
    """

    @called("jobs.Table")
    def __init__(self, make: Callable[[], Any]) -> None:
        check_callable(make, "make")
        self._make = make
        self.variable: Any = None

    def create(self) -> None:
        """Make the variable. A model that is only planned does not call this."""
        self.variable = self._make()


def find_tables(model: nnx.Module) -> Mapping[str, Table]:
    """Return the tables of a model, by the names of their attributes."""
    found = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Module):
            own = ((name, x) for name, x in vars(node).items() if isinstance(x, Table))
            found.update({".".join(map(str, (*path, name))): table for name, table in own})
    return found
