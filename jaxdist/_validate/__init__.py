"""Checks of arguments that several rooms share."""

from typing import TYPE_CHECKING

from jaxdist._late import open_late as _open_late

if TYPE_CHECKING:
    from jaxdist._validate.arguments import ErrorNote as ErrorNote
    from jaxdist._validate.arguments import as_flag as as_flag
    from jaxdist._validate.arguments import as_integer as as_integer
    from jaxdist._validate.arguments import as_iterator as as_iterator
    from jaxdist._validate.arguments import as_list as as_list
    from jaxdist._validate.arguments import as_local_path as as_local_path
    from jaxdist._validate.arguments import as_number as as_number
    from jaxdist._validate.arguments import as_path as as_path
    from jaxdist._validate.arguments import check_call_arguments as check_call_arguments
    from jaxdist._validate.arguments import check_callable as check_callable
    from jaxdist._validate.arguments import check_instance as check_instance
    from jaxdist._validate.arguments import check_keys as check_keys
    from jaxdist._validate.arguments import check_size as check_size
    from jaxdist._validate.arguments import check_text as check_text
    from jaxdist._validate.arguments import format_lines as format_lines
    from jaxdist._validate.arguments import log_without_effect as log_without_effect
    from jaxdist._validate.arguments import refuse_choice as refuse_choice
    from jaxdist._validate.arguments import respell as respell
    from jaxdist._validate.arguments import show as show
    from jaxdist._validate.arguments import spell_dtype as spell_dtype
    from jaxdist._validate.arguments import split_scheme as split_scheme
    from jaxdist._validate.arrays import as_array as as_array
    from jaxdist._validate.arrays import as_arrays as as_arrays
    from jaxdist._validate.arrays import as_floating as as_floating
    from jaxdist._validate.arrays import check_has_arrays as check_has_arrays
    from jaxdist._validate.arrays import check_of_jax as check_of_jax
    from jaxdist._validate.arrays import find_not_of_jax as find_not_of_jax
    from jaxdist._validate.arrays import is_array as is_array
    from jaxdist._validate.extras import EXTRAS as EXTRAS
    from jaxdist._validate.extras import Extra as Extra
    from jaxdist._validate.extras import cuda_plan_command as cuda_plan_command
    from jaxdist._validate.extras import require_extra as require_extra

_open_late(__name__)
