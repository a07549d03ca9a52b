"""The modes of a variable: when its copies are synchronized, and how they are combined."""

import enum


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are synchronized.

    Members:
        AUTO: The strategy decides; it uses `ON_WRITE`.
        NONE: One copy. Only outside every strategy.
        ON_WRITE: All copies are always equal: one mirrored array.
        ON_READ: Every replica has its own value; reading across replicas combines the values.

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
    """How the values that replicas assign to one variable become one value.

    Members:
        NONE: The values must be equal already.
        SUM: The sum of the values.
        MEAN: The mean of the values; for floats only.
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
