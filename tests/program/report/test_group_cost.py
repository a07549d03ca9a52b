"""Bytes and times of collectives of GPUs, whose groups are in one NVLink domain or in several."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxdist import cost, hlo
from jaxdist._program.report.group_cost import find_spread
from jaxdist._program.report.matching import CompiledRow, compiled_rows

HOSTS, LOCAL = 4, 8
NUM_GPUS = HOSTS * LOCAL
SIZE = 1 << 20
INSIDE = [[LOCAL * host + gpu for gpu in range(LOCAL)] for host in range(HOSTS)]
ACROSS = [[LOCAL * host + gpu for host in range(HOSTS)] for gpu in range(LOCAL)]
WHOLE = [list(range(NUM_GPUS))]
HALVES = [[g for g in range(NUM_GPUS) if g % 2 == half] for half in (0, 1)]

GPU_LINKS = cost.Links(cost.TABLE["nvlink-4"], cost.TABLE["infiniband-ndr"])


def _layout(platform: str) -> Any:
    devices = [
        SimpleNamespace(
            platform=platform, process_index=i // LOCAL, slice_index=0, coords=[i // LOCAL, 0, i]
        )
        for i in range(NUM_GPUS)
    ]
    mesh = SimpleNamespace(devices=np.array(devices), axis_names=("replica",))
    return SimpleNamespace(platform=platform, mesh=mesh)


def _row(
    kind: str, groups: list[list[int]], platform: str = "gpu", links: cost.Links = GPU_LINKS
) -> CompiledRow:
    n = len(groups[0])
    operand = SIZE // n if kind == "all-gather" else SIZE
    result = SIZE // n if kind == "reduce-scatter" else SIZE
    where = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    text = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups)
    line = (
        f"  %x = f32[{operand // 4}]{{0}} parameter(0)\n"
        f"  %r = f32[{result // 4}]{{0}} {kind}(f32[{operand // 4}]{{0}} %x), {where}={{{text}}}"
    )
    [found] = hlo.collectives(line)
    [row] = compiled_rows([found], [[]], _layout(platform), links, NUM_GPUS)
    return row


def _count_sent(kind: str, groups: list[list[int]]) -> tuple[float, float]:
    """Bytes that one GPU sends inside its host and between hosts, piece by piece.

    Of a group, GPU k of each host has piece k of the array (or a share of it). Pieces are summed
    inside hosts and then between the GPUs of the same place; an all-gather does it in reverse.
    """
    group = groups[0]
    local = sum(g // LOCAL == group[0] // LOCAL for g in group)
    hosts = len(group) // local
    if kind == "all-to-all":
        places = [(g // LOCAL == group[0] // LOCAL) for g in group[1:]]
        return SIZE / len(group) * sum(places), SIZE / len(group) * (len(places) - sum(places))
    inside = sum(SIZE / local for _ in range(local - 1))
    between = sum(SIZE / local / hosts for _ in range(hosts - 1))
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * inside, rounds * between


@pytest.mark.parametrize("groups", [INSIDE, ACROSS, WHOLE, HALVES])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_gpu_sends_over_the_network_only_what_its_host_cannot_give(
    kind: str, groups: list[list[int]]
) -> None:
    row = _row(kind, groups)
    assert (row.sent_inside, row.sent_between) == pytest.approx(_count_sent(kind, groups))
    assert row.sent_inside + row.sent_between == pytest.approx(row.bytes_sent)
    assert row.level == ("inside" if groups is INSIDE else "between")


def test_permute_sends_its_bytes_over_one_link() -> None:
    ring = [[i, (i + 1) % NUM_GPUS] for i in range(NUM_GPUS)]
    row = _row("collective-permute", ring)
    assert (row.level, row.sent_inside, row.sent_between) == ("between", 0, SIZE)
    assert row.seconds == pytest.approx(9.6e-6 + SIZE / 47e9)
    near = [[i, i ^ 1] for i in range(NUM_GPUS)]
    row = _row("collective-permute", near)
    assert (row.level, row.sent_inside, row.sent_between) == ("inside", SIZE, 0)


@pytest.mark.parametrize(
    ("groups", "local"), [(INSIDE, LOCAL), (ACROSS, 1), (WHOLE, LOCAL), (HALVES, LOCAL // 2)]
)
def test_predicted_time_counts_the_network_cards_of_a_group_in_one_host(
    groups: list[list[int]], local: int
) -> None:
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        wanted = cost.collective_seconds(kind, len(groups[0]), SIZE, GPU_LINKS, local=local)
        assert _row(kind, groups).seconds == wanted
    whole = cost.seconds("xla", NUM_GPUS, SIZE, GPU_LINKS, LOCAL)
    assert _row("all-reduce", WHOLE).seconds == whole


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_other_devices_send_all_bytes_at_the_level_of_the_operation(kind: str) -> None:
    link = cost.TABLE["cpu-processes"]
    for groups in (INSIDE, ACROSS, WHOLE):
        row = _row(kind, groups, "cpu", cost.Links(link, link))
        crosses = groups is not INSIDE
        assert row.sent_between == (row.bytes_sent if crosses else 0)
        assert row.sent_inside == (0 if crosses else row.bytes_sent)


def test_groups_of_different_sizes_have_the_fewest_cards_of_any_host() -> None:
    [c] = hlo.collectives(
        "%r = f32[8]{0} all-reduce(f32[8]{0} %x), replica_groups={{0,1,2,8},{9,10,11,16}}"
    )
    workers = [i // LOCAL for i in range(NUM_GPUS)]
    spread = find_spread(c, workers)
    assert (spread.workers, spread.local) == (2, 1)
