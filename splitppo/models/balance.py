"""Moving rows between the ranks of a group once their lengths are known, so that all ranks have about equal work."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from splitppo.job.collectives import Group
from splitppo.models.batching import Fields, MiniBatches, partition
from splitppo.rollout import HEADER, Rollout, Sample, pack_rows, packed_sizes, unpack_rows


def balance(
    rollout: Rollout,
    mini_batches: MiniBatches,
    fields: Fields,
    work: Callable[[int], float],
    group: Group,
    device: torch.device,
) -> tuple[Rollout, MiniBatches, Fields]:
    """Spreads the rows of each mini-batch evenly over the group's ranks, all of which must call it. Every rank receives
    all rows (a few bytes a token) and keeps its own.

    Args:
        fields: packed tensors `[N]` float32.
        work: tokens of a row -> its cost.
        device: where the group's messages travel.

    Returns:
        What this rank trains on, in the form of the arguments; the samples have no log-probs.
    """
    if group.dp_size == 1:
        return rollout, mini_batches, fields
    owned = [(row, i) for i, rows in enumerate(mini_batches) for row in rows]
    samples = [rollout.samples[rollout.index[row]] for row, _ in owned]
    table = [(i, sample.tokens) for (_, i), sample in zip(owned, samples, strict=True)]
    # a token's values side by side, so that one rank's part follows another's
    values = rollout.select(torch.stack(list(fields.values())), [row for row, _ in owned]).T
    own = [torch.tensor(part, dtype=torch.int64).flatten() for part in (table, *pack_rows(samples))]
    table, header, ids, values = _gather([*own, values.flatten()], group, device)
    mini_batch, tokens = table.view(-1, 2).T.tolist()
    headers, row_ids = header.view(-1, HEADER).tolist(), ids.split(packed_sizes(header.tolist()))
    row_values = values.view(-1, len(fields)).split(tokens)
    place = {header[0]: i for i, header in enumerate(headers)}
    kept: list[list[int]] = []
    for index in range(len(mini_batches)):
        rows = sorted(row for row, i in place.items() if mini_batch[i] == index)
        costs = [work(sum(headers[place[row]][1:3])) for row in rows]  # prompt and response
        bins = partition(costs, group.dp_size) or []
        kept.append([rows[i] for i in bins[group.dp_rank]])
    mine = [place[row] for row in sorted(row for part in kept for row in part)]
    samples = [sample for i in mine for sample in unpack_rows(headers[i], row_ids[i].tolist())]
    packed = torch.cat([values.view(-1, len(fields))[:0], *(row_values[i] for i in mine)])
    return Rollout(samples), kept, {name: packed[:, i].contiguous() for i, name in enumerate(fields)}


def gather_samples(samples: Sequence[Sample], group: Group, device: torch.device) -> list[Sample]:
    """The samples of all ranks of a group, in their order, without log-probs; on each of them, all of which call it."""
    header, ids = _gather([torch.tensor(part, dtype=torch.int64) for part in pack_rows(samples)], group, device)
    return unpack_rows(header.tolist(), ids.tolist())


def _gather(parts: Sequence[Tensor], group: Group, device: torch.device) -> list[Tensor]:
    """Each of the tensors `[n]`, gathered over the ranks and joined in their order, on the CPU."""
    sizes = group.all_gather([len(part) for part in parts])
    joined = []
    for i, part in enumerate(parts):
        padded = part.new_zeros(max(size[i] for size in sizes), device=device)
        padded[: len(part)] = part
        gathered = padded.new_empty(len(sizes) * len(padded))
        dist.all_gather_into_tensor(gathered, padded, group=group.mesh.get_group(0))
        lines = gathered.view(len(sizes), len(padded)).cpu()
        joined.append(torch.cat([line[: size[i]] for line, size in zip(lines, sizes, strict=True)]))
    return joined
