#!/usr/bin/env bash
# Trains on several nodes under SLURM, queues itself again when its time is over, and goes on there. Give it what `flowtrain fit` takes:
#   sbatch recipes/several_nodes/slurm.sh --config recipes/qwen_vl/config.yaml --config recipes/qwen_vl/64-gpus.yaml
#SBATCH --job-name=flowtrain
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:SIGUSR1@300
# What your cluster asks for; a second # at the start of a line switches it off.
##SBATCH --partition=gpu
##SBATCH --account=vision
# CONTAINER=image.sqsh starts the tasks in a container (enroot and pyxis).
#
# Five minutes before the time is over SLURM tells this script. It tells all ranks, which save `preempted.ckpt` and end, and queues
# the job again. The next start goes on from the newest checkpoint of the same module and data; the first one finds none.
set -euo pipefail

nodes=${SLURM_NNODES:?this runs inside of a job; start it with sbatch}
tasks=${SLURM_NTASKS_PER_NODE:?give --ntasks-per-node}
[[ " $* " == *" --ckpt_path"* ]] || set -- "$@" --ckpt_path last
inside=()
if [[ -n ${CONTAINER:-} ]]; then inside=(--container-image="$CONTAINER" --container-mounts="$PWD:$PWD" --container-workdir="$PWD"); fi

time_is_over=
trap 'time_is_over=yes; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1  # to the tasks, not to this script
srun --kill-on-bad-exit=1 "${inside[@]}" \
  flowtrain fit "$@" --trainer.num_nodes="$nodes" --trainer.devices="$tasks" &
status=0
wait $! || status=$?
if [[ -n $time_is_over ]]; then
  status=0
  wait $! || status=$?  # the first wait ended with the signal
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
