#!/usr/bin/env bash
# Measures the speed of one node: the embedded model, then models of Qwen2.5's sizes in every useful split. Each model
# gives a table of `splitppo bench`.
#   [sbatch --gpus-per-node GPUS] launch/compare.sh GPUS MODELS [WHAT ...]
# WHAT is default, 1.5b, small-critic, long, fixed, 7b or 7b-small-critic; the default is: default 1.5b 7b.
# MODELS/Qwen2.5-1.5B-Instruct (also -0.5B- and -7B-, if used) needs config.json and the tokenizer. Weights are random.
# The environment variable OUT names the output folder (compare). BENCH holds more flags of `splitppo bench`, such as
# "--warmup 3 --jobs colocated 5+3/critic".
#SBATCH --job-name=splitppo-bench --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
set -euo pipefail
gpus=${1:?give GPUS, the number of GPUs of this node}; models=${2:?give MODELS, the folder of the models}; shift 2
(($#)) || set -- default 1.5b 7b
for what in "$@"; do
    case $what in
        default | 1.5b | small-critic | long | fixed | 7b | 7b-small-critic) ;;
        *) echo "error: $what: use default, 1.5b, small-critic, long, fixed, 7b or 7b-small-critic" >&2; exit 2 ;;
    esac
done
out=${OUT:-compare}; mkdir "$out"
# prompts of 128 tokens: each digit is a token, and the chat template adds about 30
python -c 'import random
for i in range(4096): print("{\"question\": \"%099d\", \"answer\": \"%d\"}" % (random.Random(i).randrange(10**99), i))' > "$out/prompts.jsonl"

table() { # arguments: response lengths, model size, rows per step and GPU, tokens of a micro-batch, more flags
    # shellcheck disable=SC2086 # BENCH holds several words
    splitppo bench --gpus "$gpus" --out "$out/$what" --lengths "$1" --policy.path "$models/Qwen2.5-$2-Instruct" \
        --policy.random-init --rollout.batch-size $(($3 * gpus)) --ppo.mini-batches 4 \
        --compute.micro-batch-tokens "$4" --ppo.kl-coef 0.01 --data.files "$out/prompts.jsonl" \
        --data.prompt-key question --data.answer-key answer --reward.function exact_match "${@:5}" ${BENCH:-} || status=1
}

status=0 # after a failed job the others run all the same
jobs=(--jobs colocated) # and the critic with a half and a quarter of the GPUs, the reference with either group
for critic in $((gpus / 2)) $((gpus / 4)); do
    ((critic == 0)) || jobs+=("$((gpus - critic))+$critic" "$((gpus - critic))+$critic/critic")
done

for what in "$@"; do
    case $what in
        default)
            torchrun=(torchrun --standalone --nproc_per_node "$gpus" -m splitppo.train --run-dir "$out/default")
            if "${torchrun[@]}" > "$out/default.log" 2>&1; then
                splitppo report "$out/default"
            else
                tail -n 30 "$out/default.log" >&2; status=1
            fi
            ;;
        1.5b) table lognormal:240:1024 1.5B 128 32768 "${jobs[@]}" ;;
        small-critic) table lognormal:240:1024 1.5B 128 32768 --value.path "$models/Qwen2.5-0.5B-Instruct" "${jobs[@]}" ;;
        long) # rows that go on (rollout.window) beside whole rows, with about as many tokens to train on in each step
            most=(--jobs colocated) && ((gpus > 1)) && most+=("$((gpus - 1))+1")
            for window in 0 1024 2048 4096; do
                what=long_$window; slots=$((window ? 64 * 2000 / window / 4 * 4 : 64))
                table lognormal:2000:8192 1.5B "$slots" 32768 --rollout.window "$window" --ppo.old-logprobs engine "${most[@]}"
            done
            ;;
        fixed) table fixed:512 1.5B 128 32768 "${jobs[@]}" ;;
        7b) table lognormal:240:1024 7B 64 16384 "${jobs[@]}" ;;
        7b-small-critic) table lognormal:240:1024 7B 64 16384 --value.path "$models/Qwen2.5-1.5B-Instruct" "${jobs[@]}" ;;
    esac
done
exit "$status"
