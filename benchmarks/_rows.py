"""All rows, in the order in which they run. Numbers are those of the performance plan."""

from types import ModuleType

from benchmarks import (
    row_01_run_overhead_1leaf,
    row_02_run_overhead_100leaf,
    row_03_run_vs_tf,
    row_04_reduce_eager,
    row_05_gather_eager,
    row_06_step_parity,
    row_07_step_vs_gspmd_and_pmap,
    row_08_collectives_count,
    row_09_packs_count,
    row_10_hier_count,
    row_11_pack_small,
    row_12_pack_resnet50,
    row_13_pack_multiproc,
    row_14_allreduce_bw,
    row_17_sharded_update,
    row_20_input_put,
    row_21_input_overlap,
    row_22_trace_flat,
    row_24_no_retrace,
    row_28_inflight_safe,
    row_first_uneven,
    row_nnx_state_100,
    row_variables_100,
    table_collectives,
)

MODULES: tuple[ModuleType, ...] = (
    row_01_run_overhead_1leaf,
    row_02_run_overhead_100leaf,
    row_03_run_vs_tf,
    row_04_reduce_eager,
    row_05_gather_eager,
    row_06_step_parity,
    row_07_step_vs_gspmd_and_pmap,
    row_08_collectives_count,
    row_09_packs_count,
    row_10_hier_count,
    row_11_pack_small,
    row_12_pack_resnet50,
    row_13_pack_multiproc,
    row_14_allreduce_bw,
    row_17_sharded_update,
    row_20_input_put,
    row_21_input_overlap,
    row_22_trace_flat,
    row_24_no_retrace,
    row_28_inflight_safe,
    row_first_uneven,
    row_nnx_state_100,
    row_variables_100,
)
ROWS: dict[str, ModuleType] = {m.ROW: m for m in MODULES}
TABLES: dict[str, ModuleType] = {table_collectives.ROW: table_collectives}
