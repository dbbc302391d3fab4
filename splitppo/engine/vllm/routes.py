"""Code in vLLM's workers that tells each token's experts: of the place where it was drawn, those to
which the layers' routers sent it.

They travel beside the token's log-prob, as further columns of the ids of the tokens that have one,
so vLLM brings them from the device and through its scheduler as it brings the log-probs.
"""

# pyright: reportMissingImports=false

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.worker.gpu_worker import Worker

from splitppo.engine.vllm.worker import WeightReceiver
from splitppo.models.experts import Packing


class RouteTeller(WeightReceiver):
    """As its base; importing it changes vLLM's workers."""


def _load_model(self: Any, **options: Any) -> None:
    """The worker's method, before CUDA graphs are captured."""
    _LOAD(self, **options)
    _tell(self.model_runner)


def _tell(runner: Any) -> None:
    """Has the layers note their tokens' experts, and the runner tell them."""
    layers = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
    for layer in layers:
        if layer._quant_method.is_monolithic or not isinstance(layer.router, BaseRouter):
            raise RuntimeError(
                f"vLLM's {type(layer._quant_method).__name__} tells no experts; "
                "set --policy.replay-routing off"
            )
    router = layers[0].router
    packing = Packing(len(layers), router.top_k, router.global_num_experts)
    tokens = runner.vllm_config.scheduler_config.max_num_batched_tokens
    packed = torch.zeros(tokens, packing.width, dtype=torch.uint8, device=runner.device)

    def note(ids: Tensor, place: int) -> None:
        packing.view(packed)[: len(ids), place : place + packing.k] = ids

    for number, layer in enumerate(layers):
        layer.router.set_capture_fn(partial(note, place=number * packing.k))

    def add(output: Any, at: Tensor) -> None:
        """Puts the experts of the places `at`, at which tokens were drawn, beside log-probs."""
        if tensors := output.logprobs_tensors:
            columns = [tensors.logprob_token_ids.int(), packed.view(torch.int32)[at]]
            output.logprobs_tensors = tensors._replace(logprob_token_ids=torch.cat(columns, 1))

    if hasattr(runner, "sample"):  # vLLM's second runner
        sample = runner.sample

        def sample_and_tell(states: Tensor, batch: Any, *options: Any) -> Any:
            output, *others = sample(states, batch, *options)
            add(output, batch.logits_indices)
            return output, *others

        runner.sample = sample_and_tell
    else:
        sample_first = runner._sample

        def sample_first_and_tell(*options: Any) -> Any:
            output = sample_first(*options)
            add(output, runner.query_start_loc.gpu[1 : runner.input_batch.num_reqs + 1] - 1)
            return output

        runner._sample = sample_first_and_tell


_LOAD = Worker.load_model
Worker.load_model = _load_model
