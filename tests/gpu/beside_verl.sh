#!/usr/bin/env bash
# verl 0.9.1 and splitppo on one machine at the same time, two GPUs each: models of 1.5B by shape with random weights, long
# rows, steps as the table in docs/measured_speed.md has them.
#
#   VERL_SITE=FOLDER DATA=FOLDER TOKENIZER=FOLDER tests/gpu/beside_verl.sh OUT
#
# VERL_SITE holds verl==0.9.1 with what it needs beside vLLM 0.26.0 (ray==2.60.0, tensordict==0.10.0, torchdata==0.11.0,
# hydra-core==1.3.8, omegaconf==2.3.1, datasets==5.2.0, transformers==5.10.4, tokenizers==0.22.2, codetiming, pylatexenc)
# and a package flash_attn: its functions over torch's varlen_attn serve where no wheel exists. The script changes verl's
# file there, so that responses get lengths as `splitppo bench` draws them. DATA holds GSM8K as {train,test}.parquet,
# TOKENIZER a tokenizer with a chat template. VERL and OURS name the GPUs (0,1 and 2,3).
set -euo pipefail
out=${1:?give OUT, a folder that does not exist}
mkdir "$out"
out=$(realpath "$out")
tokens=10240 # of verl's micro-batch; more does not fit 80 GB

python3 - "$VERL_SITE" "$TOKENIZER" "$out" << 'PYTHON'
import json
import random
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

site, tokenizer, out = map(Path, sys.argv[1:])
server = site / "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
limit = "        max_tokens = max(1, min(max_tokens, max_possible_tokens))\n"
drawn = """        import math, random
        _draw = random.Random(hash(tuple(prompt_ids)))
        max_tokens = min(8192, max(1, round(_draw.lognormvariate(math.log(2000) - 0.32, 0.8))))
"""
text = server.read_text()
if drawn not in text:
    assert text.count(limit) == 1, "another version of verl"
    server.write_text(text.replace(limit, drawn + limit))
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    bos_token_id=1, eos_token_id=2, pad_token_id=2,
)
Qwen2ForCausalLM(config).bfloat16().save_pretrained(out / "model")
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
    shutil.copy(tokenizer / name, out / "model")
draw = random.Random(0)
rows = [{"question": "".join(draw.choices("0123456789", k=128)), "answer": str(i)} for i in range(4096)]
(out / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
PYTHON

models=(actor_rollout_ref.model critic.model)
verl=()
for model in "${models[@]}"; do
    verl+=("$model.path=$out/model" "$model.use_remove_padding=True" "$model.enable_gradient_checkpointing=False"
        "+$model.override_config.attn_implementation=flash_attention_2")
done
for part in actor.ppo_max critic.ppo_max critic.forward_max ref.log_prob_max rollout.log_prob_max; do
    [[ $part = critic.* ]] || part=actor_rollout_ref.$part
    verl+=("${part}_token_len_per_gpu=$tokens")
done
for part in actor_rollout_ref.actor.use critic.use actor_rollout_ref.ref.log_prob_use actor_rollout_ref.rollout.log_prob_use; do
    verl+=("${part}_dynamic_bsz=True")
done
CUDA_VISIBLE_DEVICES=${VERL:-0,1} PYTHONPATH=$VERL_SITE:${PYTHONPATH:-} python3 -m verl.trainer.main_ppo "${verl[@]}" \
    algorithm.adv_estimator=gae data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=128 data.max_prompt_length=256 data.max_response_length=8192 data.filter_overlong_prompts=True \
    data.truncation=left actor_rollout_ref.actor.strategy=fsdp2 critic.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.model.fused_kernel_options.impl_backend=triton actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.ignore_eos=True 'trainer.logger=[console]' trainer.val_before_train=False \
    trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_training_steps=7 \
    trainer.use_v1=False trainer.project_name=beside trainer.experiment_name=verl > "$out/verl.log" 2>&1 &
CUDA_VISIBLE_DEVICES=${OURS:-2,3} python3 -m splitppo bench --gpus 2 --jobs colocated --warmup 4 --steps 3 --out "$out/splitppo" \
    --lengths lognormal:2000:8192 --policy.path "$out/model" --policy.random-init --rollout.batch-size 248 --rollout.window 1024 \
    --ppo.old-logprobs engine --ppo.mini-batches 4 --ppo.kl-coef 0.01 --data.files "$out/prompts.jsonl" --data.prompt-key question \
    --data.answer-key answer --data.no-chat --reward.function exact_match
wait
grep -o "perf/total_num_tokens:[0-9]*\|perf/time_per_step:[0-9.]*" "$out/verl.log"
