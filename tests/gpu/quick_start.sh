#!/usr/bin/env bash
# The README's quick start, from `prepare` to the summary, on the shape of a model with random weights:
#   tests/gpu/quick_start.sh SHAPE GSM8K OUT [GPUS ...]
# EXTRA: more flags. A tokenizer of characters needs --rollout.max-prompt-tokens 1100, STEPS more or fewer steps (6).
# SHAPE has config.json and a tokenizer, GSM8K the original train.jsonl and test.jsonl, OUT is a new folder.
set -euo pipefail
shape=${1:?give SHAPE}; source=${2:?give GSM8K}; out=${3:?give OUT}; shift 3
(($#)) || set -- 1 2
splitppo prepare gsm8k --source "$source" --out "$out/gsm8k"
for gpus in "$@"; do
    start=$SECONDS
    torchrun --standalone --nproc_per_node "$gpus" -m splitppo.train --config configs/gsm8k/qwen2.5_0.5b.toml \
        --policy.path "$shape" --policy.random-init --data.files "$out/gsm8k/train.parquet" \
        --data.validation-files "$out/gsm8k/test.parquet" --data.validation-rows 256 --steps "${STEPS:-6}" \
        --log.validate-every 3 ${EXTRA:-} --run-dir "$out/$gpus" 2>&1 | tee "$out/$gpus.log"
    splitppo report "$out/$gpus"
    splitppo export "$out/$gpus"
    echo "$gpus GPUs: $((SECONDS - start)) s from the command to the exported folder"
done
