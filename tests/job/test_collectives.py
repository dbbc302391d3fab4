"""A group whose mesh has more axes than `rows`: ranks along them are a set that works on the same
rows."""

import math

import pytest
import torch
from ranks import run_ranks, run_threads
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from splitppo.algo import Moments, all_moments
from splitppo.job.collectives import Group


def asked(group: Group) -> dict:
    """What each method gives; every number differs by data-parallel rank, and what only maxima see
    by place in the set, too."""
    place = group.set_rank
    # of the data-parallel rank, so of all its set
    rows = torch.tensor([1.0, 2.0, 6.0][: 1 + group.dp_rank])
    (whole,) = all_moments(group.all_gather, [rows])
    group.barrier()
    return {
        "rank": (group.dp_rank, group.dp_size),
        "place": (group.set_rank, group.set_size),
        "speaks": group.speaks,
        "is_first": group.is_first,
        "sum": group.all_sum(torch.tensor([1, 10 * (group.dp_rank + 1)])),
        "max": group.all_max([group.dp_rank, place, -5]),
        "gathered": group.all_gather(("row", group.dp_rank)),
        "moments": whole,
        "ids": group.broadcast(
            torch.arange(3) + 10 * group.dp_rank if group.speaks else None, torch.int64
        ),
        "floats": group.broadcast(torch.tensor([0.5]) if group.speaks else None, torch.float32),
        "nothing": group.broadcast(torch.zeros(0) if group.speaks else None, torch.float32),
        "of first": group.of_first(lambda: (place, 10 * group.dp_rank)),
        "parts": group.all_to_all(
            [torch.tensor([10.0 * group.dp_rank + place] * (2 * i + group.dp_rank)) for i in (0, 1)]
        ),
    }


def check(parts: list[dict], width: int) -> None:
    for number, found in enumerate(parts):
        rank, place = divmod(number, width)
        assert found["rank"] == (rank, 2)
        assert found["place"] == (place, width)
        assert found["speaks"] == (place == 0)
        assert found["is_first"] == (number == 0)
        assert found["sum"].tolist() == [2, 30], "a set's rows count once"
        assert found["sum"].dtype == torch.float64
        assert found["max"] == [1, width - 1, -5], "over all ranks"
        assert found["gathered"] == [("row", 0), ("row", 1)]
        count, mean, variance = (float(part) for part in vars(found["moments"]).values())
        assert (count, mean, variance) == pytest.approx((3, 4 / 3, 1 / 3))  # of 1, 1, 2
        assert isinstance(found["moments"], Moments)
        assert found["ids"].tolist() == [10 * rank + i for i in range(3)]
        assert (found["ids"].dtype, found["floats"].dtype) == (torch.int64, torch.float32)
        assert found["floats"].tolist() == [0.5]
        assert found["nothing"].tolist() == []
        assert found["of first"] == (0, 10 * rank)
        assert [part.tolist() for part in found["parts"]] == [
            [float(place)] * 2 * rank,
            [10.0 + place] * (2 * rank + 1),
        ]


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2), (2, 3), (2, 2, 3)])
def test_rows_count_once_and_a_set_has_what_its_first_rank_has(shape):
    check(run_threads(shape, asked), math.prod(shape[1:]))


def mesh_rank(rank: int) -> list[dict]:
    """A rank of a mesh, and of the mesh with its axes in the other order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "tensor"))
    turned = DeviceMesh.from_group(
        [mesh.get_group("tensor"), mesh.get_group("rows")],
        "cpu",
        mesh=mesh.mesh.T.contiguous(),
        mesh_dim_names=("tensor", "rows"),
    )
    return [asked(Group(mesh)), asked(Group(turned))]


def test_a_real_mesh_of_processes_does_the_same_in_any_order_of_its_axes():
    for found in zip(*run_ranks(4, mesh_rank), strict=True):
        check(list(found), 2)


def test_an_alone_group_talks_to_nobody():
    (found,) = run_threads(
        1, lambda group: (group.all_sum(torch.ones(2)).tolist(), group.all_max([3]), group.speaks)
    )
    assert found == ([1.0, 1.0], [3], True)
