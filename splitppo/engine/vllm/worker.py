"""Code in vLLM's workers, imported before the model is built: loads the trainer's buckets, reports
what is held."""

# pyright: reportMissingImports=false

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.platforms import current_platform

from splitppo.engine.vllm.messages import Entry
from splitppo.engine.vllm.weight_check import Received, Report
from splitppo.job.child import kill_with_parent

kill_with_parent()  # but no signal is ignored: vLLM ends its workers with SIGTERM


if current_platform.is_cpu():

    def _plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    # vLLM would pack the weights for the CPU once, after which new weights could not be loaded.
    utils.dispatch_cpu_unquantized_gemm = _plain_linear


class WeightReceiver:
    """Mixed into vLLM's worker class. Its methods are called through collective_rpc."""

    rank: int
    device: Any
    get_model: Any

    def splitppo_attach(self, handles: list[list[Any]]) -> None:
        """Maps this worker's buckets. `handles[rank]`: of each the arguments of `from_file`, or of
        CUDA IPC."""
        self._splitppo_buckets = [
            # The seventh argument is the device's index, as the sender numbers its devices.
            cast(Any, rebuild_cuda_tensor)(*handle[:6], self.device.index, *handle[7:])
            if self.device.type == "cuda"
            else torch.from_file(**handle)
            for handle in handles[self.rank]
        ]
        self._splitppo_received = Received(self.get_model())

    def splitppo_limit(self, vocabulary: int) -> None:
        """Prevents ids from `vocabulary` on from being drawn. The logits keep their length, for
        which vLLM's kernels were compiled."""
        processors = [
            module for module in self.get_model().modules() if isinstance(module, LogitsProcessor)
        ]
        if not processors:
            raise RuntimeError(
                f"{type(self.get_model()).__name__} has no LogitsProcessor "
                "to limit the vocabulary by"
            )

        def limit(_module: Any, _args: Any, logits: Tensor | None) -> None:
            if logits is not None:  # not all workers of a tensor-parallel engine have the logits
                logits[..., vocabulary:] = -torch.inf

        for module in processors:
            if vocabulary < module.org_vocab_size:
                module.register_forward_hook(limit)

    def splitppo_load(self, number: int, entries: list[Entry]) -> None:
        """Loads a bucket's tensors."""
        bucket = self._splitppo_buckets[number]
        self._splitppo_received.load(
            {
                entry.name: bucket[entry.first :][: entry.shape.numel() * entry.dtype.itemsize]
                .view(entry.dtype)
                .view(entry.shape)
                for entry in entries
            }
        )
        if bucket.is_cuda:
            torch.cuda.synchronize()  # the trainer fills the bucket again

    def splitppo_report(self) -> Report:
        return self._splitppo_received.report()
