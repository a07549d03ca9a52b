"""Rules that give each parameter of a model its placement on the mesh, by its path."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist.partition._activations import constrain as constrain
    from jaxdist.partition._activations import gather as gather
    from jaxdist.partition._activations import remat_policy as remat_policy
    from jaxdist.partition._place import place as place
    from jaxdist.partition._placements import ByNames as ByNames
    from jaxdist.partition._placements import Replicate as Replicate
    from jaxdist.partition._placements import Shard as Shard
    from jaxdist.partition._placements import Split as Split
    from jaxdist.partition._placements import Stage as Stage
    from jaxdist.partition._rules import Rules as Rules
    from jaxdist.partition._rules import fsdp as fsdp
    from jaxdist.partition._rules import fsdp_tensor_parallel as fsdp_tensor_parallel
    from jaxdist.partition._rules import replicated as replicated
    from jaxdist.partition._rules import tensor_parallel as tensor_parallel

_open_late(__name__)
