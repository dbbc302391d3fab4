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
from vllm.v1.worker import gpu_worker

from splitppo.engine.vllm.messages import Entry
from splitppo.engine.vllm.weight_check import Received, Report
from splitppo.job.child import kill_with_parent

kill_with_parent()  # but no signal is ignored: vLLM ends its workers with SIGTERM


if current_platform.is_cpu():
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def _plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    class _PlainExperts(cpu_moe.CPUUnquantizedExperts):
        """vLLM's experts, with weights as they were loaded."""

        def process_weights_after_loading(self, layer: Any) -> None: ...

        def apply(self, output: Tensor, hidden_states: Tensor, *args: Any, **options: Any) -> None:
            order = ("w1", "w2", "topk_weights", "topk_ids", "activation")
            named = dict(zip(order, args, strict=False)) | options
            output.zero_()
            for expert in named["topk_ids"].unique().tolist():
                rows, places = (named["topk_ids"] == expert).nonzero(as_tuple=True)
                biases = [
                    None if bias is None else bias[expert] for bias in (self.w1_bias, self.w2_bias)
                ]
                inner = nn.functional.linear(hidden_states[rows], named["w1"][expert], biases[0])
                gated = inner.new_empty(len(rows), inner.shape[1] // 2)
                apply_moe_activation(named["activation"], gated, inner)
                states = nn.functional.linear(gated, named["w2"][expert], biases[1])
                weighted = states * named["topk_weights"][rows, places, None]
                output.index_add_(0, rows, weighted.to(output.dtype))

    # vLLM would pack the weights for the CPU once, after which new weights could not be loaded.
    utils.dispatch_cpu_unquantized_gemm = _plain_linear
    for name in ("CPUUnquantizedExperts", "X86CPUUnquantizedExperts", "ArmCPUUnquantizedExperts"):
        setattr(cpu_moe, name, _PlainExperts)


def _beside_others(sleep: Any) -> Any:
    """vLLM's `sleep`, also on a GPU that another process uses. At its end, with all memory
    released, it demands that more is free than before; the other may have taken that."""

    def call(worker: Any, level: int = 1) -> None:
        try:
            sleep(worker, level)
        except AssertionError as error:
            if "Memory usage increased" not in str(error):
                raise
            print("another process took memory of this GPU while the engine went to sleep")

    return call


gpu_worker.Worker.sleep = _beside_others(gpu_worker.Worker.sleep)


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
