#!/usr/bin/env bash
# Trains on several nodes under SLURM. Give it what `flowtrain fit` takes:
#   sbatch recipes/several_nodes/slurm.sh --config recipes/qwen_vl/config.yaml --config recipes/qwen_vl/64-gpus.yaml
#SBATCH --job-name=flowtrain
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --signal=SIGUSR1@300
# The signal: five minutes before the job's time is over all ranks save `preempted.ckpt` and end.
# The same command with --ckpt_path last goes on from there.
set -euo pipefail

nodes=${SLURM_NNODES:?this runs inside of a job; start it with sbatch}
exec srun --kill-on-bad-exit=1 \
  flowtrain fit "$@" --trainer.num_nodes="$nodes" --trainer.devices="${SLURM_NTASKS_PER_NODE:?give --ntasks-per-node}"
