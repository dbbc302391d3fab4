"""What a rank computes on, and in which precision."""

import torch

from splitppo.config import Config
from splitppo.errors import UserError
from splitppo.job.launch import Launch


def pick_device(config: Config, launch: Launch) -> torch.device:
    """The rank's device: one GPU each, or the CPU, on which the embedded model trains where GPUs are too few. Raises
    UserError if a GPU is asked for and not there, or there are fewer GPUs than local ranks."""
    gpus, wanted = torch.cuda.device_count(), config.compute.device
    embedded = config.policy.path == "tiny"
    if wanted == "cpu" or (wanted == "auto" and (not gpus or (embedded and gpus < launch.local_world))):
        return torch.device("cpu")
    if gpus < launch.local_world:
        raise UserError(
            f"compute.device={wanted} with {launch.local_world} ranks on a node of {gpus} GPUs: each rank needs its "
            f"own; start {f'{gpus} ranks' if gpus else 'on a GPU machine'} or set --compute.device cpu"
        )
    return torch.device("cuda", launch.local_rank)


def dtype_of(config: Config, device: torch.device) -> torch.dtype:
    """The precision of forward and backward."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if config.compute.dtype == "auto" else config.compute.dtype)


def compiles(config: Config, device: torch.device) -> bool:
    """Whether layers are compiled."""
    return config.compute.compile == "on" or (config.compute.compile == "auto" and device.type == "cuda")
