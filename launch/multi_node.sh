#!/usr/bin/env bash
# One torchrun on each node of a Slurm job. What follows the script's name goes to splitppo.train, a preset first:
#   sbatch --nodes 4 --gpus-per-node 8 launch/multi_node.sh configs/my.toml --steps 500
# Submit it from a folder that all nodes share: the run is runs/slurm-JOBID there (or --run-dir). Five minutes before
# the time limit, or when Slurm takes the nodes away, the run is saved and queued again, to go on from there.
#SBATCH --job-name=splitppo --nodes=2 --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --requeue --signal=B:USR1@300 --output=slurm-%j.log --open-mode=append
set -uo pipefail
[[ ${1:-} == *.toml ]] && set -- --config "$@"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:?no GPUs were asked for: set RANKS_PER_NODE}}
torchrun=(torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$ranks" --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID"
  --rdzv_endpoint "$head:$((20000 + SLURM_JOB_ID % 20000))" --rdzv_conf "join_timeout=${JOIN_TIMEOUT:-300}")
program=(-m splitppo.train --run-dir "runs/slurm-$SLURM_JOB_ID" "$@")
echo "on each of $SLURM_JOB_NODELIST: ${torchrun[*]} ${program[*]}"

# Slurm hands a signal to all processes of a job: the ranks are to hear of the end, and torchrun is not
srun --kill-on-bad-exit=1 bash -c 'trap "" USR1; exec "$0" --local-addr "$SLURMD_NODENAME" "$@"' \
  "${torchrun[@]}" "${program[@]}" &
trap 'stop=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
while wait $!; status=$?; kill -0 $! 2> /dev/null; do :; done
((status)) && [[ ${stop:-} ]] && exec scontrol requeue "$SLURM_JOB_ID"
exit "$status"
