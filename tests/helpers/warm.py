"""Imported by the server that ranks are forked from (ranks.py): what each of them would work out
anew, once for all."""

import gc

from kept import keep_costs, keep_flags, keep_mismatches

from splitppo.config.cli import parse
from splitppo.models.build import build
from splitppo.models.tiny import model_config

keep_flags()
keep_mismatches()
keep_costs()
parse([])
for kind in ("policy", "value"):
    build(model_config(), kind)
gc.collect()
gc.freeze()
