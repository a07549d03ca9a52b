"""The mesh of the caller's context, and the shardings that a program gives to JAX."""

from jaxdist._compat.meshes.context import call_with_auto_types as call_with_auto_types
from jaxdist._compat.meshes.context import find_spec_of_type as find_spec_of_type
from jaxdist._compat.meshes.context import get_context_mesh as get_context_mesh
from jaxdist._compat.meshes.context import get_explicit_mesh as get_explicit_mesh
from jaxdist._compat.meshes.context import outside_of_meshes as outside_of_meshes
from jaxdist._compat.meshes.context import use_abstract_mesh as use_abstract_mesh
from jaxdist._compat.meshes.context import use_no_mesh as use_no_mesh
from jaxdist._compat.meshes.shardings import rewrite_shardings as rewrite_shardings
