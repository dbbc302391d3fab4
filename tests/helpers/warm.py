"""Imported by the server that ranks are forked from (ranks.py): what each of them would work out
anew, once for all."""

import gc
import importlib

from kept import keep_costs, keep_flags, keep_mismatches

gc.disable()  # all that is imported stays
for name in (
    "splitppo.train",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.bert.modeling_bert",
    "pytest",
):
    importlib.import_module(name)

from splitppo.config.cli import parse  # noqa: E402
from splitppo.models.build import build  # noqa: E402
from splitppo.models.tiny import model_config  # noqa: E402

keep_flags()
keep_mismatches()
keep_costs()
parse([])
for kind in ("policy", "value"):
    build(model_config(), kind)
gc.collect()
gc.freeze()
gc.enable()
