#!/usr/bin/env bash
# Starts torchrun on one machine, with or without Slurm. The arguments go to splitppo.train; a preset comes first:
#   launch/single_node.sh configs/my.toml --steps 500
#   sbatch --gpus-per-node 4 launch/single_node.sh configs/my.toml
# Under Slurm the run's folder is runs/slurm-JOBID (or --run-dir). Five minutes before the time limit the run saves a
# checkpoint, and the job is queued again.
#SBATCH --job-name=splitppo --nodes=1 --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --requeue --signal=B:USR1@300 --output=slurm-%j.log --open-mode=append
set -uo pipefail
[[ ${1:-} == *.toml ]] && set -- --config "$@"
((${SLURM_RESTART_COUNT:-0})) && set -- "$@" --resume auto
[[ ${SLURM_JOB_ID:-} ]] && set -- --run-dir "runs/slurm-$SLURM_JOB_ID" "$@"
torchrun=(torchrun --standalone --nproc_per_node "${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-auto}}" -m splitppo.train "$@")
export SPLITPPO_STOPPED=$PWD/slurm-${SLURM_JOB_ID:-$$}.saved # rank 0 makes this file when it has saved a stopped run
rm -f "$SPLITPPO_STOPPED"
echo "${torchrun[*]}"

trap 'stop=1; pkill -USR1 -P $!' USR1 # to the ranks; torchrun ignores it, or it would end them after 30 s
trap 'kill -INT $!' INT HUP
trap 'kill -TERM $!' TERM
setsid bash -c 'trap "" USR1; exec "$@"' node "${torchrun[@]}" &
while kill -0 $! 2> /dev/null; do wait $!; done
wait $!; status=$?
rm "$SPLITPPO_STOPPED" 2> /dev/null && [[ ${stop:-} && ${SLURM_JOB_ID:-} ]] && exec scontrol requeue "$SLURM_JOB_ID"
exit "$status"
