#!/usr/bin/env bash
# How fast is a node of eight GPUs: the embedded default, then Qwen2.5's 1.5B and 7B shapes in every split that makes
# sense, each a table of splitppo.bench.
#   launch/eight_gpus.sh MODELS [default] [1.5b] [7b]
# MODELS/Qwen2.5-1.5B-Instruct and MODELS/Qwen2.5-7B-Instruct need a config.json and the tokenizer: weights are drawn.
# All that comes out is in the folder OUT (eight_gpus).
#SBATCH --job-name=splitppo-bench --nodes=1 --ntasks-per-node=1 --gpus-per-node=8
set -euo pipefail
models=${1:?MODELS, the folder of the models}; shift
(($#)) || set -- default 1.5b 7b
out=${OUT:-eight_gpus}; mkdir "$out"
# a digit is a token, and a chat template adds about 30: prompts of 128 tokens
python -c 'import random
for i in range(4096): print("{\"question\": \"%0100d\", \"answer\": \"%d\"}" % (random.Random(i).randrange(10**100), i))' > "$out/prompts.jsonl"

compare() { # a table: name of the model, tokens of a micro-batch, placements
    python -m splitppo.bench --gpus 8 --jobs "${@:3}" --out "$out/$1" --lengths lognormal:240:1024 \
        --policy.path "$models/$1" --policy.random-init --value.random-init --compute.micro-batch-tokens "$2" \
        --data.files "$out/prompts.jsonl" --data.prompt-key question --data.answer-key answer \
        --reward.function exact_match --rollout.batch-size 1024 --ppo.mini-batches 4 --ppo.kl-coef 0.01 || status=1
}

status=0 # a job that fails costs its line of the table

for what in "$@"; do
    case $what in
        default)
            if torchrun --nproc_per_node 8 -m splitppo.train --run-dir "$out/default" > "$out/default.log" 2>&1; then
                grep '^start-up' "$out/default.log"; python -m splitppo.report "$out/default"
            else
                tail -n 30 "$out/default.log" >&2; status=1
            fi
            ;;
        1.5b) compare Qwen2.5-1.5B-Instruct 32768 colocated 4+4/barrier {4+4,5+3,6+2}{,/critic} ;;
        7b) compare Qwen2.5-7B-Instruct 16384 colocated 4+4/barrier {4+4,5+3}{,/critic} ;;
        *) echo "error: $what: write default, 1.5b or 7b" >&2; exit 2 ;;
    esac
done
exit "$status"
