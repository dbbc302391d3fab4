"""Whatever is wrong in what a user gives: one line that names value, rule and remedy, and exit
status 2."""

import ast
import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from ranks import run_ranks
from runs import Torchrun
from safetensors.torch import load_file, save_file
from transformers import BertConfig, Gemma2Config, LlamaConfig

from splitppo import train
from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.config.rules import RULES, check
from splitppo.engine.vllm import vllm_version
from splitppo.errors import UserError, one_line
from splitppo.job.launch import Launch
from splitppo.models import weights
from splitppo.models.tiny import build_tiny
from splitppo.run import main as run_main

SMALL = ("--steps=2", "--rollout.batch-size=8", "--ppo.mini-batches=2", "--log.validate-every=0")
COLOCATED = ("--dry-run", "--world-size=4", "--placement.mode=colocated")


def blocks(text: str) -> list[str]:
    """The entries of a table: a line each, and lines that go on with an indent."""
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    return [" ".join(entry.split()) for entry in re.split(r"\n(?! )", text.strip())]


def cases(text: str) -> list[tuple[list[str], list[str]]]:
    """A command's flags => what is said of them, ` ... ` where words are left out."""
    entries = [entry.split(" => ") for entry in blocks(text)]
    return [(shlex.split(flags), said.split(" ... ")) for flags, said in entries]


FLAGS = cases(r"""
--steps=x => --steps ... 'x'
--steps=1.5 => --steps ... '1.5'
--data.chat False => Unrecognized options: False; a switch takes no value ... --data.no-chat
--ppo.no-whiten=0 --steps 2 => Unrecognized options: 0; a switch takes no value
--checkpoint.last yes --data.chat no => Unrecognized options: yes, no; a switch takes no value
--rollout.bath-size=8 => --rollout.bath-size ... --rollout.batch-size
--engine.kind=sglang => --engine.kind ... sglang
--policy.optim.schedule=step => --policy.optim.schedule ... step
--policy.optim.betas=0.9 => --policy.optim.betas
--reward.clip 1 => --reward.clip
--reward.weights 0.5,2 => --reward.weights ... 0.5,2
--reward.normalize=std => --reward.normalize ... std
--data.overlong=drop => --data.overlong ... drop
--data.max-rows=all => --data.max-rows ... all
--ppo.kl-kind=k4 => --ppo.kl-kind ... k4
--ppo.importance=rows => --ppo.importance ... rows
stray => stray
--engine.steady => Unrecognized options: --engine.steady; see --help
""")

# For each rule of config/rules.py: a value that breaks it, the rule, the settings.
BOUNDS = [
    tuple(row.split(" | "))
    for row in blocks(r"""
0 | must be at least 1 | steps nodes ppo.epochs ppo.mini_batches engine.max_rows
    rollout.samples rollout.batch_size rollout.chunks rollout.max_prompt_tokens data.max_rows
    env.max_turns env.max_turn_tokens reward.workers reward.concurrency
    ppo.value_epochs ppo.value_mini_batches log.validate_samples
    ppo.kl_horizon engine.tensor_parallel fsdp.tensor_parallel value.tensor_parallel
    reference.tensor_parallel fsdp.sequence_parallel value.sequence_parallel
    reference.sequence_parallel reward.tensor_parallel reward.sequence_parallel
    teacher.tensor_parallel teacher.sequence_parallel
    rollout.max_context env.max_observation_tokens value.layers value.pretrain_epochs
-1 | must be at least 1 | rollout.max_new_tokens data.validation_rows
    compute.micro_batch_tokens
0 | must be at least 1, or node | fsdp.shard_size
-1 | must be at least 0 | checkpoint.every checkpoint.keep checkpoint.keep_every log.samples
    log.validate_every value.pretrain_steps
    reward.overlong_tokens policy.optim.warmup_steps
-0.001 | must be at least 0 | ppo.kl_coef ppo.kl_loss_coef ppo.entropy_coef
    policy.optim.lr
-0.1 | must be at least 0 | value.optim.weight_decay
0.0 | must be at least 0.001, or logits overflow | rollout.temperature
0.0001 | must be 0 or at least 0.001, or logits overflow | log.validate_temperature
9999999 | must be at most 1000000 | rollout.batch_size world_size nodes
1025 | must be at most 1024 | reward.workers
-1.0 | must be at least 0 | value.optim.max_grad_norm
-1.0 | must be at least 0; it is subtracted | reward.missing_eos_penalty
    reward.overlong_penalty
0.0 | must be above 0 | reward.timeout ppo.kl_target ppo.importance_cap timeout ppo.clip_high
    ppo.value_clip ppo.clip_low ppo.lam_alpha policy.optim.eps value.optim.eps env.timeout
    distill.coef
(-1.0, -1.0) | must be a lower and a higher bound | reward.clip value.range
('echo', 'gsm8k', 'echo') | names a function twice; name it once |
    reward.function reward.validation
[1] | must be a JSON object with distinct names, such as '{"NAME": 1}' | data.chat_kwargs
    data.task_settings env.settings
{ | must be a JSON object | data.chat_kwargs
1.01 | must lie between 0 and 1 | ppo.gamma ppo.lam_value policy.optim.min_lr_ratio
    value.optim.min_lr_ratio
1.01 | must lie between 0 and 1, or be adaptive | ppo.lam
-0.1 | must lie between 0 and 1 | ppo.lam_value
0 | must lie between 1 and 9 | data.digits
99999999999999999999 | must fit into 64 bits, as torch's generators need |
    seed
100000000000000.0 | must lie between 0 and 1000000000 | timeout
1.0 | must be above 1; use 3.0, or None to turn it off | ppo.dual_clip
(0.9, 1.0) | must lie in [0, 1); use 0.9 0.999 | policy.optim.betas value.optim.betas
1.5 | must lie between 0 and 1 | engine.memory_fraction
-1 | must be at least 0; 0 turns it off | rollout.top_k rollout.window policy.lora.rank
    value.lora.rank distill.top_k
0 | must be above 0 | policy.lora.alpha value.lora.alpha
0.0 | must be above 0 and at most 1; 1 turns it off | rollout.top_p
""")
]
NO_STOP = "holds an empty string, which would end every response at once; drop it"

# What the rules refuse, or the dry run before it builds anything.
EARLY = [
    *(
        (
            ["--ppo.baseline=batch", f"--{name.replace('_', '-')}={value}", "--rollout.samples=2"],
            [f"{name}={value}: ppo.baseline=batch has no value model; unset {name}"],
        )
        for name, value in {
            "value.optim.lr": 0.25,
            "value.path": "tiny",
            "value.pretrain_steps": 1,
            "ppo.lam_value": 0.5,
            "ppo.value_epochs": 2,
            "ppo.value_mini_batches": 2,
        }.items()
    ),
    pytest.param(
        ["--engine.kind=vllm"],
        ["engine.kind=vllm, but vLLM is not installed; pip install", "or --engine.kind hf"],
        marks=pytest.mark.skipif(vllm_version() is not None, reason="vLLM is installed"),
    ),
    *cases(r"""
--rollout.stop a '' =>
    rollout.stop=('a', '') holds an empty string, which would end every response at once; drop it
--rollout.batch-size=510 --ppo.mini-batches=4 =>
    rollout.batch_size=510 is not divisible by ppo.mini_batches=4; use 508 or 512
--rollout.batch-size=510 --ppo.mini-batches=4 --rollout.samples=3 =>
    rollout.batch_size=510 is not divisible by ppo.mini_batches=4; use 504 or 516
--rollout.samples=3 --ppo.mini-batches=1 =>
    batch_size=128 is not a multiple ... samples=3 ... 126 or 129
--rollout.batch-size=2 --ppo.mini-batches=3 => rollout.batch_size=2 ... use 3
--value.optim.lr=inf => value.optim.lr=inf must be a finite number
--ppo.kl-coef=nan => ppo.kl_coef=nan must be a finite number
--policy.optim.betas nan 0.9 => policy.optim.betas=nan
--ppo.dual-clip=nan => ppo.dual_clip=nan must be a finite number
--reward.clip -inf 1 => reward.clip=-inf must be a finite number
--reward.weights nan => reward.weights=nan must be a finite number
--reward.failed-score=nan => reward.failed_score=nan must be a finite number
--ppo.kl-target=6 => ppo.kl_target=6.0 adapts ppo.kl_coef, which is 0; start it above 0
--ppo.value-mini-batches=3 =>
    ppo.value_mini_batches=3 must divide ppo.mini_batches=2 or be a multiple of
--rollout.batch-size=12 --ppo.mini-batches=2 --ppo.value-mini-batches=8 =>
    rollout.batch_size=12 is not divisible by ppo.value_mini_batches=8
--ppo.clip-low=1 =>
    ppo.clip_low=1.0 must be below 1: the ratio's lower bound is 1 - clip_low; lower it
--ppo.clip-mode=mask --ppo.dual-clip=3 =>
    ppo.dual_clip=3.0 bounds a loss that ppo.clip_mode=mask already drops
--value.pretrain-steps=9 --steps=3 =>
    value.pretrain_steps=9 is more than steps=3; raise steps
--reward.normalize=batch --rollout.window=8 =>
    reward.normalize=batch with rollout.window=8: a step may have one row, which would score
    0; use running
--value.range 0 1 --ppo.kl-coef=0.1 =>
    value.range=(0.0, 1.0) with ppo.kl_coef=0.1: a return that includes the KL has no bound
--value.range 0 1 --ppo.lam=adaptive =>
    value.range=(0.0, 1.0) needs undiscounted returns ... ppo.lam_value=adaptive; set both to 1
--value.range 0 1 --ppo.lam-value=1 --ppo.gamma=0.9 =>
    value.range=(0.0, 1.0) needs undiscounted returns, but ppo.gamma=0.9, ppo.lam_value=1.0
--ppo.baseline=batch --ppo.lam=adaptive =>
    ppo.lam=adaptive: ppo.baseline=batch uses no values; use ppo.lam=1
--ppo.baseline=group =>
    ppo.baseline=group averages a prompt's other responses ... use rollout.samples=8
--ppo.baseline=group --rollout.samples=2 --rollout.window=4 =>
    ppo.baseline=group with rollout.window=4: a prompt's responses end in different steps ... use
    ppo.baseline=batch, or rollout.window=0
--dry-run --world-size=4 --ppo.baseline=batch --placement.actor=2 =>
    ppo.baseline=batch has no value model, so placement's critic ranks would hold no  ... use
    placement.mode=colocated, or give them a reward.model, a teacher, or the reference
--value.layers=3 => value.layers=3: tiny has 2 layers; use at most 2
--value.freeze nowhere => value.freeze=nowhere matches no weight; their names are like
--value.freeze '(' --steps=3 => value.freeze=( is not a regular expression ... correct it
--policy.freeze body embeddings =>
    policy.freeze=body embeddings leaves no weight to train; name fewer
--env.path guess --env.tools calculator =>
    env.path=guess with env.tools: an environment runs its own tools; unset one
--env.format-reward=1 => env.format_reward=1 rewards tool calls ... name some
--env.seed=prompt => env.seed=prompt: there is no environment ... unset env.seed
--env.max-turns=3 => env.max_turns=3: there is no environment ... unset env.max_turns
--env.network --env.tools calculator => env.network is for the tool python ... unset it
--rollout.max-context=9 =>
    rollout.max_context=9 is only for environments and tools; set rollout.max_n
--data.task=guess --rollout.lengths lengths.txt =>
    rollout.lengths fixes the length ... data.task) ends them; unset one
--env.path=chess => env.path=chess: no such environment; use guess or path/to/file.py:n
--env.tools=abacus => env.tools=abacus: no such tool; use calculator, python or path
--env.tools=calculator =>
    env.tools needs a chat template, and the tokenizer ... use an instruct model, or an envi
--data.task=guess --rollout.max-context=1025 =>
    rollout.max_context=1025 is more than the 1024 (max_position_embeddings) that ... use 1024
--reward.overlong-tokens=6 --rollout.max-new-tokens=6 =>
    reward.overlong_tokens=6 must be below rollout.max_new_tokens=6; lower it
--fsdp.tensor-parallel=2 --reference.tensor-parallel=3 =>
    reference.tensor_parallel=3 and sequence_parallel=1 make parallel groups of 3 ranks, not a
    multiple
    of the policy's 2; leave both unset
--fsdp.sequence-parallel=2 --fsdp.tensor-parallel=2 --reference.tensor-parallel=1 =>
    reference.tensor_parallel=1 and sequence_parallel=2 make parallel groups of 2 ranks, not a
    multiple
    of the policy's 4; leave both unset
--fsdp.sequence-parallel=2 --compute.packing=off =>
    fsdp.sequence_parallel=2 needs packed rows, but compute.packing=off; unset that
--reward.sequence-parallel=2 =>
    reward.sequence_parallel=2 splits a reward.model, and none is set; unset it
--reward.tensor-parallel=2 =>
    reward.tensor_parallel=2 splits a reward.model, and none is set; unset it
--log.validate-samples=2 =>
    log.validate_samples=2: greedy responses are all equal; raise log.validate_temperature
--placement.reference=critic =>
    placement.reference=critic with ppo.kl_coef=0 ... the critic group only uses the KL in the
    reward; set only ppo.kl_coef above 0
--placement.reference=critic --ppo.kl-coef=0.1 --ppo.kl-loss-coef=0.1 =>
    placement.reference=critic with ppo.kl_coef=0.1, ppo.kl_loss_coef=0.1
--placement.reference=critic --ppo.kl-coef=0.1 =>
    placement.reference=critic needs two groups, but every rank plays both roles; unset it
--ppo.old-logprobs=engine --ppo.importance=token =>
    ppo.importance=token needs the trainer's old log-probs ... change one of them
--ppo.old-logprobs=engine --rollout.top-k=5 =>
    ppo.old_logprobs=engine with rollout.top_p=1, rollout.top_k=5 ... use top_p 1 and top_k 0
--rollout.lengths={d}/none.txt =>
    rollout.lengths={d}/none.txt: ... No such file ... name a file of whole numbers
--rollout.lengths={d}/lengths.txt =>
    lengths.txt holds 3 numbers; write some from 1 to rollout.max_new_tokens=6, one a line
--rollout.lengths={d}/key.toml => '[rollout]'; name a file of whole numbers
--rollout.lengths={d}/bare.txt => bare.txt holds 0 numbers; write some from 1 to
--rollout.lengths={d}/bare.txt --ppo.mask-truncated =>
    which ppo.mask_truncated drops; unset one
--rollout.lengths={d}/bare.txt --rollout.stop=a => leave rollout.stop unset
--policy.path={d}/capped --policy.random-init --compute.packing=on =>
    compute.packing=on: policy.path={d}/capped: rows can't be packed ... use auto or off
--data.task=sums => data.task=sums: there is no such task; use echo, addition, guess, reasoning
--engine.kind=hf --engine.tensor-parallel=2 =>
    engine.tensor_parallel=2 is for vLLM only, and the engine is hf; use 1, or
--engine.kind=hf --engine.sleep=1 =>
    engine.sleep=1 is for vLLM only, and the engine is hf; use auto, or
--world-size=2 => world_size=2 is for --dry-run ... --nproc_per_node
# presets
--config={d}/none.toml => --config {d}/none.toml: no such file
--config={d}/broken.toml => --config {d}/broken.toml: not TOML ... line 2 ... write it as
--config={d}/model/model.safetensors => not TOML
--config={d}/key.toml =>
    key.toml: there is no rollout.batch-size; did you mean rollout.batch_size
--config={d}/empty_section.toml => there is no checkpoints; did you mean checkpoint.
--config={d}/below.toml => there is no policy.lr; did you mean policy.optim.lr
--config={d}/elsewhere.toml => there is no rollout.kl_coef; did you mean ... ppo.kl_coef
--config={d}/type.toml => type.toml: Error parsing --ppo.lam ... 'high'
--config={d}/list.toml => list.toml: Unrecognized options: 2; 
--config={d}/bool.toml => bool.toml: rollout.batch_size = true: write a value
--config={d}/switch.toml => switch.toml: ppo.whiten = 1: write true or false
--config={d}/pair.toml => pair.toml: ... --reward.clip ... FLOAT FLOAT ... ['5'] ... see --help
--config={d} => --config {d}: it is a folder
--config={d}/key.toml --config {d}/list.toml => --config is given twice
mine.toml => Unrecognized options: mine.toml; ... a preset follows --config
--rollout.max-new-tokens=1024 =>
    a prompt of 1 tokens and rollout.max_new_tokens=1024 are 1025 together, more than the 1024 ...
    path=tiny can
--data.overlong=filter => data.overlong=filter needs a limit of prompts; set
    rollout.max_prompt_tokens
--config={d}/section.toml => section.toml: --steps '{}': write INT
--config={d}/value.toml => value.toml: there is no ppo; did you mean ppo.
# placement
--placement.actor=2 =>
    placement.actor=2: all 1 ranks play both ... start more ranks (a dry run: --world-
--placement.mode=per_node => of 1 ranks: with placement.mode=per_node ... use colocated
--dry-run --world-size=8 --placement.actor=5 --placement.critic=4 =>
    actor=5 ... 8 ranks ... give one
--dry-run --world-size=8 --placement.actor=6 --fsdp.tensor-parallel=4 =>
    tensor_parallel=4 does not divide the 6 actor ranks, 6 on a node or in a replica, into parallel
    groups; set fsdp.
--dry-run --world-size=4 --placement.mode=colocated --fsdp.tensor-parallel=4 =>
    policy.path=tiny with tensor_parallel=4: type 'llama' has num_attention_heads=2, no multiple
    of 4; use
--dry-run --world-size=4 --placement.mode=colocated --fsdp.sequence-parallel=4 =>
    policy.path=tiny with sequence_parallel=4, tensor_parallel=1: type 'llama' has 2 attention
    heads, no multiple of 4; use a sequence_parallel of [1, 2]
--dry-run --world-size=4 --placement.mode=colocated --fsdp.sequence-parallel=4
    --fsdp.tensor-parallel=2 =>
    sequence_parallel=4 beside tensor_parallel=2 does not divide the 4 actor ranks, 4 on a node or
    in     a replica, into parallel groups; set fsdp.sequence_parallel to one of [1, 2]
--dry-run --world-size=8 --placement.actor=9 => actor=9 and critic=-1 of 8 ranks
--dry-run --world-size=8 --nodes=2 --placement.actor=5 => placement.actor=5 ... multiples of 2
--dry-run --world-size=7 --nodes=2 => world_size=7 ... set --world-size to a multiple of 2
--dry-run --world-size=0 => world_size=0
# files; test_data.py has the others
--data.files={d}/none.jsonl => data.files={d}/none.jsonl: no such file ... give a path
--data.files={d}/good.jsonl =>
    data.answer_key=reward_model.ground_truth ... columns: prompt, answer; set
--data.files={d}/json.parquet =>
    json.parquet has a column prompt of mixed types ... write the rows as .jsonl
--data.files={d}/good.jsonl --data.prompt-key=q.a =>
    data.prompt_key=q.a: {d}/good.jsonl row 1 has no
--data.files={d}/images.jsonl =>
    images.jsonl row 1 has a column images, but only text models are supported
--data.files={d}/ids.jsonl => row 1 has a prompt whose message 1 is not {role: string
--data.files={d}/good.jsonl --data.validation-files={d}/none.jsonl --data.answer-key=answer =>
    data.validation_files={d}/none.jsonl: no such file
--data.files={d}/good.jsonl --data.validation-files={d}/model/../good.jsonl =>
    data.validation_files={d}/model/../good.jsonl is one of data.files, too ... split the file in
    two, or name
# model folders
--policy.path={d}/none => policy.path={d}/none: no such folder ... OWNER/NAME
--policy.path={d}/empty => model folder {d}/empty: no config.json there; give
--policy.path=acme/none =>
    policy.path=acme/none: no such folder, and not in the cache ... HF_HUB_OFFLINE
--policy.path={d}/own => model folder {d}/own: it brings Python code ... --policy.trust-remote-code
--data.files=hf://datasets/acme/none/a.jsonl --log.validate-every=0 =>
    data.files=hf://datasets/acme/none/a.jsonl:  ... hf download acme/none --repo-type dataset
--policy.path={d}/config_only => config_only: no model.safetensors; load it with transformers and
--policy.path={d}/config_only --policy.random-init => config_only: no tokenizer there; save one
--policy.path={d}/model --rollout.max-new-tokens=99999 =>
    rollout.max_new_tokens=99999 are 100000 together, more than the 1024 (max_position_embeddings)
    that policy.
--policy.path={d}/unknown =>
    model folder {d}/unknown: transformers can't read config.json
--policy.path={d}/heads =>
    model folder {d}/heads: transformers can't read config.json: ... attention heads
--policy.path={d}/encoder => 'bert' is not a causal language model; choose another policy.path
--value.path={d}/encoder => 'bert' is not a causal language model; choose another value.path
--policy.path={d}/cut => cut/model.safetensors can't be read as a ... fetch it again
--policy.path={d}/shape =>
    weight model.norm.weight is [32], but [64] in the model; take config.json
--policy.path={d}/lacks => no weight model.norm.weight in its safetensors
--reward.model={d}/headless =>
    model folder {d}/headless: no weight score.weight in its safetensors; take
    config.json
--policy.path={d}/half => half/b.safetensors can't be read as a safetensors file
--value.path={d}/narrow --policy.random-init =>
    value.path={d}/narrow: its vocabulary of 50 ... (83)
--policy.path={d}/adapter =>
    model folder {d}/adapter: no config.json there; ... a LoRA adapter goes to --policy.lora.path
--value.path={d}/adapter => model folder {d}/adapter: no config.json there
--policy.path={d}/index =>
    index/model.safetensors.index.json is broken (KeyError: 'weight_map'); fetch
--policy.path={d}/pad =>
    model folder {d}/pad: config.json has pad_token_id = 83; write null, or a token's id
--value.path={d}/pad =>
    model folder {d}/pad: config.json has pad_token_id = 83; ... a whole number below 83
--policy.path={d}/torn =>
    model folder {d}/torn: generation_config.json is not a JSON object (Expecting ... fix
--policy.path={d}/listed => model folder {d}/listed: generation_config.json is not a JSON object (
--policy.path={d}/named =>
    {d}/named: generation_config.json has eos_token_id = "<eos>"; write null, or a
--policy.path={d}/mixed =>
    {d}/mixed: generation_config.json has eos_token_id = [1, "<eos>"]; write null
--policy.path={d}/act =>
    model folder {d}/act: no model can be built from its config.json (KeyError ... corr
--policy.path={d}/negative =>
    model folder {d}/negative: no model can be built ... correct that file, or use
--policy.path={d}/rope =>
    model folder {d}/rope: transformers can't read config.json:
--policy.path={d}/longest =>
    model folder {d}/longest: its tokenizer can't be read:  ... save it again
--policy.path={d}/endless =>
    policy.path={d}/endless: config.json, generation_config.json and the tokenizer name no
    eos_token_id ... so no response would end; name one there, or set --rollout.stop
--policy.path={d}/endless_chat => name no eos_token_id ... name one there, or set --rollout.stop
--policy.path={d}/garbled =>
    model folder {d}/garbled: its tokenizer can't be read:  ... ; save it again
--reference.path={d}/narrow --ppo.kl-coef=0.1 =>
    model folder {d}/narrow: no model.safetensors; load it with transformers and save_pretrained
    it
# reward models
--reward.model={d}/none => reward.model={d}/none: no such folder
--reward.model={d}/no_value =>
    model folder {d}/no_value: type 'mamba' is not a sequence-classification model; choose
--reward.model={d}/model =>
    reward.label=unset: reward.model={d}/model has the labels ... or choose another reward.model
--reward.model={d}/two => reward.label=unset: reward.model={d}/two has the labels ... name the one
--policy.path={d}/headless =>
    headless: type 'llama' is not a causal language model: it scores texts ... choose another policy
--reference.path={d}/two --ppo.kl-coef=0.1 => {d}/two: type 'llama' is not a causal
--reward.model={d}/adapter => model folder {d}/adapter: no config.json there
--reward.model={d}/judge => model folder {d}/judge: no model.safetensors; load it
--reward.model={d}/judge --policy.random-init =>
    model folder {d}/judge: no tokenizer there; save
# reward functions
--reward.function=none =>
    reward.function=none leaves nothing that scores the rows; set reward.model, an environment or a
    teacher
# a teacher
--teacher.offload => teacher.offload=True: there is no teacher; set teacher.path, or unset
--distill.top-k=8 => distill.top_k=8: there is no teacher; set teacher.path
--teacher.path=tiny --distill.divergence=jsd =>
    distill.divergence=jsd is over the teacher's most likely tokens; set distill.top_k 8
--teacher.prompt-key=hint =>
    teacher.prompt_key=hint is a column of data.files, and there are none; name some
--teacher.prompt-key=hint --data.task=guess =>
    teacher.prompt_key=hint: an environment ... writes the prompts ... unset one
--teacher.prompt-key=q.a --data.files={d}/good.jsonl --data.answer-key=answer =>
    teacher.prompt_key=q.a: {d}/good.jsonl row 1 has no such column ... set --teacher.prompt-key
--teacher.path=tiny --distill.top-k=84 =>
    distill.top_k=84 is more than the 83 tokens of the policy's tokenizer; lower it
--teacher.path=tiny --reward.function=none --log.validate-every=0 --value.pretrain-steps=2 =>
    value.pretrain_steps=2: nothing is rewarded, so there is no value model ... unset
--teacher.path=tiny --reward.function=none --log.validate-every=0 --ppo.lam=adaptive =>
    ppo.lam=adaptive: ppo.baseline=value uses no values where nothing is rewarded; use ppo.lam=1
--reward.function none echo =>
    reward.function=none echo: name functions, or only none with a reward.model
--reward.function=none --reward.model={d}/judge --log.validate-every=2 =>
    log.validate_every=2: held-out rows need a function ... name one with --reward.validation
--reward.function echo exact_match --reward.weights 0.5 =>
    reward.weights=(0.5,) for 2 functions; give one weight per function, in their order
--reward.validation=exactmatch =>
    reward.validation=exactmatch: no such rule; use auto, exact_match
--reward.function echo {d}/reward.py:gone => reward.function={d}/reward.py:gone:  ... has no gone
--reward.function={d}/reward.py:rows =>
    reward.py:rows: it does not take ... (0 is not a callable object)
--reward.function=exactmatch => reward.function=exactmatch: no such rule; use auto, exact_match
--reward.function={d}/none.py:score => reward.function={d}/none.py:score: no such file
--reward.function={d}/reward.py:scores =>
    reward.py has no scores when it is imported
--reward.function={d}/reward.py:two =>
    reward.py:two: it does not take ... define it with (data_source,
--reward.function={d}/imports.py:score =>
    imports.py failed: ModuleNotFoundError ... line 2 ... fix the file
# run folder and resume
--run-dir={d}/rows.csv => run_dir={d}/rows.csv ... choose another --run-dir
--resume={d}/run/checkpoints/step_000004 => needs --run-dir
--resume={d}/nowhere --run-dir={d}/new =>
    --resume {d}/nowhere: no complete checkpoint ... name a run's folder, or one
--run-dir={d}/run --steps=3 =>
    steps=3, but {d}/run/checkpoints/step_000004 is of step 4; raise --steps
"""),
]

DATA = cases(r"""
--data.task=guess --rollout.max-context=16 =>
    rollout.max_context=16 leaves no room after the longest prompt of 16 tokens; raise it
# told by the dry run, and by all ranks at once, with a process group, before a model is built
--data.files={d}/third.jsonl => third.jsonl row 3 has a prompt of type int ... must be a string
--data.files={d}/good.jsonl --rollout.max-new-tokens=1020 --reward.function=exact_match =>
    a prompt of 9 tokens and rollout.max_new_tokens=1020 are 1029 together, more than the 1024 ...
    lower rollout.max_new_tokens
--data.files={d}/good.jsonl --reward.function=last_number =>
    good.jsonl row 2: ground truth 'blue' ... last_number needs a number; set --reward.function
--data.files={d}/good.jsonl =>
    reward.function=auto: no rule for data_source 'good' ... set --reward.function
--data.files={d}/good.jsonl --reward.function=exact_match --reward.validation=auto
    --data.validation-files={d}/two.jsonl =>
    reward.validation=auto: no rule for data_source 'two' ... set --reward.validation to
    exact_match,
--data.files={d}/good.jsonl --reward.function=exact_match --data.validation-files={d}/third.jsonl =>
    data.prompt_key=prompt: {d}/third.jsonl row 3 has a prompt of type int
--data.files={d}/good.jsonl --policy.path={d}/mute =>
    good.jsonl row 1 has a prompt without tokens; drop the row or fix the tokenizer
""")

REWARDS = """
rows = 0
def score(data_source, solution_str, ground_truth, extra_info): return 1.0
def two(solution_str, ground_truth): return 1.0
"""

# imported by the trainer without trouble, and not by its reward workers
IN_WORKER = """import os, sys
if sys.argv[0].endswith("workers/main.py"):
    {}
def score(data_source, solution_str, ground_truth, extra_info): return 1.0
"""


# copies of the model, and what of a file is other there
FIELDS: list[tuple[str, str, Any]] = [
    ("pad", "config.json", {"pad_token_id": 83}),
    ("torn", "generation_config.json", "{"),
    ("listed", "generation_config.json", "[1]"),
    ("named", "generation_config.json", {"eos_token_id": "<eos>"}),
    ("mixed", "generation_config.json", {"eos_token_id": [1, "<eos>"]}),
    ("act", "config.json", {"hidden_act": "no such"}),
    ("negative", "config.json", {"intermediate_size": -1}),
    ("rope", "config.json", {"rope_parameters": 5}),
    ("longest", "tokenizer_config.json", {"model_max_length": "1024"}),
    ("endless", "config.json", {"eos_token_id": None}),
    ("endless", "generation_config.json", {"eos_token_id": None}),
    ("endless", "tokenizer_config.json", {"eos_token": None}),
    ("endless_chat", "config.json", {"eos_token_id": None}),
    ("endless_chat", "generation_config.json", {"eos_token_id": -1}),
    ("endless_chat", "tokenizer_config.json", {"eos_token": None, "bos_token": "\ufffd"}),
    (
        "endless_chat",
        "chat_template.jinja",
        "{% for m in messages %}{{ m.content }}{{ bos_token }}{% endfor %}",
    ),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the table names and that is there."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = {
        "broken.toml": "steps = 3\n[rollout\n",
        "key.toml": "[rollout]\nbatch-size = 8\n",
        "empty_section.toml": "[checkpoints]\n",
        "below.toml": "[policy]\nlr = 1\n",
        "elsewhere.toml": "[rollout]\nkl_coef = 1\n",
        "type.toml": 'steps = 3\n[ppo]\nlam = "high"\n',
        "list.toml": "steps = [1, 2]\n",
        "bool.toml": "[rollout]\nbatch_size = true\n",
        "switch.toml": "[ppo]\nwhiten = 1\n",
        "pair.toml": "[reward]\nclip = 5\n",
        "section.toml": "[steps]\n",
        "value.toml": "ppo = 3\n",
        "rows.csv": "prompt,answer\n",
        "good.jsonl": '{"prompt": "1+1=", "answer": "2"}\n'
        '{"prompt": "The sky: ", "answer": "blue"}\n',
        "third.jsonl": '{"prompt": "a", "answer": "2"}\n{"prompt": "b", "answer": "2"}\n'
        '{"prompt": 3, "answer": "2"}\n',
        "two.jsonl": '{"prompt": "1+1+1+1=", "answer": "4"}\n',
        "images.jsonl": '{"prompt": "<image>a", "images": ["a.png"]}\n',
        "ids.jsonl": '{"prompt": [17, 4, 9]}\n',
        "adapter/adapter_config.json": '{"peft_type": "LORA"}',
        "no_value/config.json": '{"model_type": "mamba"}',
        "reward.py": REWARDS,
        "raises.py": IN_WORKER.format("raise OSError('no GPU here')"),
        "exits.py": IN_WORKER.format("os._exit(3)"),
        "imports.py": "import os\nimport no_such_module\n",
        "empty/README.md": "",
        "own/config.json": '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}',
        "own/own.py": "raise SystemExit",
        "unknown/config.json": '{"model_type": "nope"}',
        "heads/config.json": '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7}',
    }
    for role in ("actor", "critic"):
        files = (".metadata", "state.json", "__0_0.distcp")
        listed = json.dumps({"step": 4, "files": {name: [0, 0] for name in files}})
        part = f"run/checkpoints/step_000004/{role}"
        texts |= dict.fromkeys((f"{part}/{name}" for name in files), "") | {
            f"{part}/manifest.json": listed
        }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("model", "shape", "lacks", "cut", "half", "index", "garbled", "headless", "mute"):
        build_tiny(folder / name, seed=0)
    for name, file, changes in FIELDS:
        if not (folder / name).exists():
            shutil.copytree(folder / "model", folder / name)
        path = folder / name / file
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(changes if isinstance(changes, str) else json.dumps(known | changes))
    weights = load_file(folder / "model" / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, folder / "lacks" / "model.safetensors")
    save_file(
        weights | {"model.norm.weight": norm[:32].clone()}, folder / "shape" / "model.safetensors"
    )
    (folder / "cut" / "model.safetensors").write_bytes(b"cut")
    index = {
        "weight_map": {
            "model.norm.weight": "a.safetensors",
            "model.embed_tokens.weight": "b.safetensors",
        }
    }
    for name in ("half", "index"):  # transformers reads a single file first
        (folder / name / "model.safetensors").rename(folder / name / "a.safetensors")
    (folder / "half" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "index" / "model.safetensors.index.json").write_text("{}")
    (folder / "garbled" / "tokenizer.json").write_text("{}")
    (folder / "mute" / "chat_template.jinja").write_text("{{ '' }}")
    scores = ["LlamaForSequenceClassification"]
    for name, labels in (("judge", 1), ("headless", 1), ("two", 2)):
        made = LlamaConfig.from_pretrained(
            folder / "model", num_labels=labels, architectures=scores
        )
        made.save_pretrained(folder / name)
    texts_of_json = pyarrow.array(['"7"'], pyarrow.string()).cast(pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts_of_json}), folder / "json.parquet")
    BertConfig().save_pretrained(folder / "encoder")
    (folder / "lengths.txt").write_text("3\n4 99999")
    (folder / "bare.txt").write_text("\n")
    shutil.copytree(folder / "model", folder / "capped")
    sizes: Any = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    Gemma2Config(vocab_size=200, hidden_size=16, intermediate_size=16, **sizes).save_pretrained(
        folder / "capped"
    )
    LlamaConfig.from_pretrained(folder / "model").save_pretrained(folder / "config_only")
    LlamaConfig(vocab_size=50, hidden_size=64, num_attention_heads=4).save_pretrained(
        folder / "narrow"
    )
    return folder


def command(argv: list[str], inputs: Path) -> list[str]:
    return [word.format(d=inputs) for word in argv]


def assert_told(err: str, says: list[str], inputs: Path) -> None:
    """One line, and all that it must say."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    for text in says:
        assert text.replace("{d}", str(inputs)) in err


def forbidden(*_: Any, **__: Any) -> None:
    raise AssertionError("too late: this could have been told before")


@pytest.mark.parametrize(("argv", "says"), FLAGS, ids=lambda value: " ".join(value))
@pytest.mark.timeout(20)
def test_a_flag_that_tyro_refuses_is_named(argv, says, capsys, monkeypatch):
    monkeypatch.setattr(run_main, "Runtime", forbidden)
    assert train.main(argv) == 2
    (err,) = capsys.readouterr().err.splitlines()
    assert all(text in err for text in says), err


def dry_run(argv: list[str]) -> None:
    config = parse(argv)
    check(config)
    run_main.dry_run(config, Launch())


@pytest.mark.parametrize(("argv", "says"), EARLY, ids=lambda value: " ".join(value))
@pytest.mark.timeout(20)
def test_what_is_wrong_is_said_in_a_line(argv, says, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "fill", forbidden)
    with pytest.raises(UserError) as error:
        dry_run(command(argv, inputs))
    assert_told(f"error: {one_line(str(error.value))}\n", says, inputs)


@pytest.mark.parametrize(("argv", "says"), EARLY[::12], ids=lambda value: " ".join(value))
@pytest.mark.timeout(20)
def test_told_before_anything_is_written_or_built(
    argv, says, inputs, tmp_path, capsys, monkeypatch
):
    """One in twelve, by the program as it is typed, in a run and a dry run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_main, "Runtime", forbidden)
    monkeypatch.setattr(weights, "fill", forbidden)
    before = sorted(path for path in inputs.rglob("*") if "__pycache__" not in path.parts)
    for dry in ([], ["--dry-run"]):
        if not (dry and "--world-size=2" in argv):  # wrong without it alone
            assert train.main([*command(argv, inputs), *dry]) == 2
            assert_told(capsys.readouterr().err, says, inputs)
    assert sorted(path for path in inputs.rglob("*") if "__pycache__" not in path.parts) == before
    assert list(tmp_path.iterdir()) == []


def changed(section: Any, name: str, value: Any) -> Any:
    """A configuration with one setting changed."""
    head, _, rest = name.partition(".")
    return replace(
        section, **{head: changed(getattr(section, head), rest, value) if rest else value}
    )


@pytest.mark.parametrize(("shown", "rule", "names"), BOUNDS)
def test_every_setting_of_a_rule_keeps_it(shown, rule, names):
    for name in names.split():
        value = shown if "kwargs" in name or "settings" in name else ast.literal_eval(shown)
        with pytest.raises(UserError, match=f"^{re.escape(f'{name}={shown} {rule}')}"):
            check(changed(Config(), name, value))


def test_every_rule_on_a_setting_has_a_row_above():
    tested = {(name, rule) for *_, rule, names in BOUNDS for name in names.split()}
    tested.add(("rollout.stop", NO_STOP))
    # test_steps.py has those of reward.steps
    rules = {(name, rule) for _, rule, names in RULES for name in names.split()}
    assert {(name, rule) for name, rule in rules if name != "reward.steps"} <= tested


@pytest.mark.parametrize(
    ("library", "argv", "says"),
    [
        (
            "wandb",
            ["--log.trackers=wandb"],
            "log.trackers=wandb: wandb is not installed; pip install wandb, or",
        ),
        (
            "tensorboard",
            ["--log.trackers", "tensorboard"],
            "log.trackers=tensorboard: tensorboard is not installed; pip install tensorboard, or",
        ),
        (
            "math_verify",
            ["--reward.function=math"],
            "reward.function=math: math_verify is not installed; pip install math-verify",
        ),
        (
            "math_verify",
            ["--reward.validation=math"],
            "reward.validation=math: math_verify is not installed; pip install math-verify",
        ),
    ],
)
def test_a_library_that_is_not_installed(library, argv, says, monkeypatch):
    find = importlib.util.find_spec

    def find_others(name: str, package: str | None = None) -> Any:
        return None if name == library else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    with pytest.raises(UserError, match=re.escape(says)):
        dry_run(argv)


def test_a_gpu_that_is_not_there(capsys):
    assert train.main(["--compute.device=cuda"]) == 2
    err = capsys.readouterr().err
    assert err == (
        "error: compute.device=cuda with 1 ranks on a node of 0 GPUs: each rank needs its own; "
        "start on a GPU machine or set --compute.device cpu\n"
    )


def main_rank(rank: int, argv: list[str]) -> tuple[int, str]:
    """Exit status of a rank and what it says on stderr. It must not come to read weights."""
    weights.fill = forbidden
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = train.main(argv)
    return status, said.getvalue()


@pytest.mark.parametrize(("argv", "says"), DATA, ids=lambda value: " ".join(value))
def test_wrong_rows_are_told_by_the_dry_run(argv, says, inputs, monkeypatch):
    monkeypatch.setattr(weights, "fill", forbidden)
    with pytest.raises(UserError) as error:
        dry_run([*SMALL, *command(argv, inputs), "--data.answer-key=answer"])
    assert_told(f"error: {one_line(str(error.value))}\n", says, inputs)


@pytest.mark.parametrize(("argv", "says"), DATA[:1], ids=lambda value: " ".join(value))
def test_wrong_rows_are_reported_by_one_rank_before_weights_are_read(argv, says, inputs, tmp_path):
    given = [
        *SMALL,
        *command(argv, inputs),
        "--data.answer-key=answer",
        f"--run-dir={tmp_path / 'run'}",
    ]
    results = run_ranks(2, main_rank, given, timeout=200)
    assert [status for status, _ in results] == [2, 2]
    assert_told("".join(err for _, err in results), says, inputs)


def own_tracebacks(said: str) -> list[str]:
    """Those of the ranks."""
    return [
        part
        for part in said.split("Traceback (most recent call last)")[1:]
        if "splitppo/train.py" in part
    ]


def test_torchrun_shows_a_wrong_flag_once_whichever_rank_is_first(tmp_path):
    job = Torchrun(
        2, train.main, ["--rollout.batch-size=510", "--ppo.mini-batches=4"], out=tmp_path / "out"
    )
    assert job.wait(200) == 1
    line = "error: rollout.batch_size=510 is not divisible by ppo.mini_batches=4; use 508 or 512"
    assert job.said().splitlines().count(line) == 1, job.said()
    assert own_tracebacks(job.said()) == []


@pytest.mark.parametrize(
    ("file", "cause"),
    [
        (
            "raises",
            "in a worker: importing the reward file {d}/raises.py failed: OSError: no GPU here",
        ),
        (
            "exits",
            "its process ended with status 3 while it imported the reward {d}/exits.py:score; fix "
            "the file",
        ),
    ],
)
def test_a_reward_that_its_worker_cannot_import_ends_the_job_with_its_cause_last(
    file, cause, inputs, tmp_path
):
    run, cause = tmp_path / "run", re.escape(cause.format(d=inputs))
    argv = [
        *SMALL,
        "--steps=1000",
        f"--run-dir={run}",
        f"--reward.function={inputs}/{file}.py:score",
        "--timeout=60",
    ]
    job = Torchrun(2, train.main, argv, out=tmp_path / "out")
    assert job.wait(200) == 1
    assert (
        not list((run / "metrics").glob("critic.jsonl"))
        or not (run / "metrics" / "critic.jsonl").read_text()
    )
    said = job.said()
    ours, _, last = said.rpartition("Root Cause")
    assert re.search(cause, last), said
    assert own_tracebacks(ours) == [], said
    assert len(re.findall(f"^error: {cause}", ours, re.MULTILINE)) == 1, said
