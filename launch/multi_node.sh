#!/usr/bin/env bash
# One torchrun a node, started by Slurm:
#   sbatch --nodes 4 --gpus-per-node 8 launch/multi_node.sh --config configs/my.toml --run-dir runs/mine
# Everything behind the script's name goes to splitppo.train. The run's folder must be on a file system that all
# nodes share. To go on after a time limit, submit the same line again: --resume auto is the default.
#SBATCH --job-name=splitppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --output=slurm-%j.log
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 20000))
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:?no GPUs on the nodes: set RANKS_PER_NODE}}

srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc_per_node "$ranks" \
  --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:$port" \
  -m splitppo.train "$@"
