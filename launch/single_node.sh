#!/usr/bin/env bash
# torchrun on one machine, with or without Slurm. What follows the script's name goes to splitppo.train, a preset first:
#   launch/single_node.sh configs/my.toml --steps 500
#   sbatch --gpus-per-node 4 launch/single_node.sh configs/my.toml
# Under Slurm the run is runs/slurm-JOBID (or --run-dir). Five minutes before the time limit, or when Slurm takes the
# node away, it is saved and queued again, to go on from there.
#SBATCH --job-name=splitppo --nodes=1 --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --requeue --signal=B:USR1@300 --output=slurm-%j.log --open-mode=append
set -uo pipefail
[[ ${1:-} == *.toml ]] && set -- --config "$@"
[[ ${SLURM_JOB_ID:-} ]] && set -- --run-dir "runs/slurm-$SLURM_JOB_ID" "$@"
ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-auto}}
torchrun=(torchrun --standalone --nproc_per_node "$ranks" -m splitppo.train "$@")
echo "${torchrun[*]}"

# the ranks are to hear of the end, and torchrun is not: it would give them 30 s
setsid "${torchrun[@]}" &
trap 'stop=1; pkill -USR1 -P $!' USR1 TERM
trap 'kill -INT $!' INT HUP
while wait $!; status=$?; kill -0 $! 2> /dev/null; do :; done
((status)) && [[ ${stop:-} && ${SLURM_JOB_ID:-} ]] && exec scontrol requeue "$SLURM_JOB_ID"
exit "$status"
