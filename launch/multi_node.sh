#!/usr/bin/env bash
# Starts one torchrun on each node of a Slurm job. The arguments go to splitppo.train; a preset comes first:
#   sbatch --nodes 4 --gpus-per-node 8 launch/multi_node.sh configs/my.toml --steps 500
# Submit it from a folder that all nodes share. The run's folder is runs/slurm-JOBID there (or --run-dir). Five minutes
# before the time limit, or when Slurm preempts the job, the run saves a checkpoint, and the job is queued again.
# CONTAINER=IMAGE sbatch ... runs it in an image of the Dockerfile (pyxis and enroot), which sees this folder alone.
#SBATCH --job-name=splitppo --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --signal=B:USR1@300 --output=slurm-%j.log --open-mode=append
set -uo pipefail
[[ ${1:-} == *.toml ]] && set -- --config "$@"
((${SLURM_RESTART_COUNT:-0})) && set -- "$@" --resume auto
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:?the job has no GPUs: set --gpus-per-node or RANKS_PER_NODE}}
torchrun=(torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$ranks" --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID"
  --rdzv_endpoint "$head:$((20000 + SLURM_JOB_ID % 20000))" --rdzv_conf "join_timeout=${JOIN_TIMEOUT:-300}")
program=(-m splitppo.train --run-dir "runs/slurm-$SLURM_JOB_ID" "$@")
export SPLITPPO_STOPPED=$PWD/slurm-$SLURM_JOB_ID.saved # rank 0 makes this file when it has saved a stopped run
rm -f "$SPLITPPO_STOPPED"
echo "on each of $SLURM_JOB_NODELIST: ${torchrun[*]} ${program[*]}"

trap 'stop=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1 # to all processes; torchrun must ignore it
srun --kill-on-bad-exit=1 --cpu-bind=none \
  ${CONTAINER:+--container-image="$CONTAINER" --container-mounts="$PWD:$PWD" --container-workdir="$PWD"} \
  bash -c 'trap "" USR1; exec "$0" --local-addr "$SLURMD_NODENAME" "$@"' \
  "${torchrun[@]}" "${program[@]}" &
while kill -0 $! 2> /dev/null; do wait $!; done
wait $!; status=$?
if rm "$SPLITPPO_STOPPED" 2> /dev/null; then
  [[ ${stop:-} ]] && exec scontrol requeue "$SLURM_JOB_ID"
  sleep 300 # Slurm sent SIGTERM itself: it will queue a preempted job again, or end a cancelled one
fi
exit "$status"
