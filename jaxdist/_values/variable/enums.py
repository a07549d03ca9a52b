"""How the copies of a variable are kept together."""

import enum


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together.

    Members:
        AUTO: The strategy decides; it is `ON_WRITE`.
        NONE: There is one copy. Only outside every strategy.
        ON_WRITE: The copies are the same at all times: one mirrored array.
        ON_READ: Every replica has its own; they are combined when read across replicas.

    Example:
        >>> VariableSynchronization.ON_READ.name
        'ON_READ'

    Source:
        `tf.VariableSynchronization`.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas give to one variable become one value.

    Members:
        NONE: They have to be the same already.
        SUM: Their sum.
        MEAN: Their mean; for floats only.
        ONLY_FIRST_REPLICA: The value of the first replica of the whole job.

    Example:
        >>> VariableAggregation.SUM.name
        'SUM'

    Source:
        `tf.VariableAggregation`.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
