"""Moving rows between the ranks of a group once their lengths are known, so that all have about the same work."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from splitppo.models.sharding import all_objects
from splitppo.rollout import Rollout, Sample, deal


def balance(
    rollout: Rollout,
    mini_batches: Sequence[Sequence[int]],
    fields: dict[str, Tensor],
    work: Callable[[int], float],
    mesh: DeviceMesh,
    device: torch.device,
) -> tuple[Rollout, list[list[int]], dict[str, Tensor]]:
    """Deals each mini-batch's rows out anew over the group; all its ranks must call it.

    Every rank is shown all rows (a few bytes a token), and keeps its own. Which rows are together doesn't change.

    Args:
        mini_batches: this rank's rows of each.
        fields: packed tensors `[N]` float32.
        work: tokens of a row -> its cost.
        device: where the group's messages travel.

    Returns:
        What this rank is to learn from, in the form of the arguments; the samples have lost their log-probs.
    """
    # figures of a token side by side, so that the ranks' parts are one after the other
    parts = _gather([part.flatten() for part in _flat(rollout, mini_batches, fields)], mesh, device)
    table, tokens, figures = parts[0].view(-1, 4), parts[1], parts[2].view(-1, len(fields))
    rows = table.tolist()
    ids = tokens.split([prompt + response for _, _, prompt, response in rows])
    lines = figures.split([row[3] for row in rows])
    place = {row: i for i, (row, _, _, _) in enumerate(rows)}
    own: list[list[int]] = []
    for index in range(len(mini_batches)):
        held = sorted(row for row, mini_batch, _, _ in rows if mini_batch == index)
        lots = deal([work(len(ids[place[row]])) for row in held], mesh.size()) or []
        own.append([held[i] for i in lots[mesh.get_local_rank()]])
    samples = []
    for row in sorted(row for part in own for row in part):
        prompt, both = rows[place[row]][2], ids[place[row]].tolist()
        samples.append(Sample(row, both[:prompt], both[prompt:], [], True))
    kept = torch.cat([figures[:0], *(lines[place[sample.row]] for sample in samples)])
    return Rollout(samples), own, {name: kept[:, i].contiguous() for i, name in enumerate(fields)}


def _flat(
    rollout: Rollout, mini_batches: Sequence[Sequence[int]], fields: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """`[rows, 4]` int64: row, mini-batch, tokens of prompt and response; `[L]` int64 ids; `[N, fields]` float32."""
    named = [(row, i) for i, rows in enumerate(mini_batches) for row in rows]
    samples = [rollout.samples[rollout.index[row]] for row, _ in named]
    table = [(row, i, len(s.prompt), len(s.response)) for (row, i), s in zip(named, samples, strict=True)]
    tokens = [token for sample in samples for token in sample.prompt + sample.response]
    figures = rollout.select(torch.stack(list(fields.values())), [row for row, _ in named])
    return torch.tensor(table, dtype=torch.int64).view(-1, 4), torch.tensor(tokens, dtype=torch.int64), figures.T


def _gather(parts: Sequence[Tensor], mesh: DeviceMesh, device: torch.device) -> list[Tensor]:
    """Each of the tensors `[n]` as all ranks have it, one rank's after the other, on the CPU."""
    sizes = all_objects([len(part) for part in parts], mesh)
    found = []
    for i, part in enumerate(parts):
        padded = part.new_zeros(max(size[i] for size in sizes), device=device)
        padded[: len(part)] = part
        gathered = padded.new_empty(len(sizes) * len(padded))
        dist.all_gather_into_tensor(gathered, padded, group=mesh.get_group())
        whole = gathered.view(len(sizes), len(padded)).cpu()
        found.append(torch.cat([line[: size[i]] for line, size in zip(whole, sizes, strict=True)]))
    return found
