#!/usr/bin/env bash
# Trains on several nodes by torchrun. Start it on every node, with the node's number from 0 and what `flowtrain fit` takes:
#   NODES=8 MASTER=10.0.0.1 recipes/several_nodes/torchrun.sh 0 --config recipes/qwen_vl/config.yaml --config recipes/qwen_vl/64-gpus.yaml
# A job of which a rank dies is started again three times; say --ckpt_path last to have it go on from the newest checkpoint.
set -euo pipefail

: "${NODES:?say how many nodes there are}" "${MASTER:?say at which address the others reach node 0}"
node=${1:?say which node this is, from 0}
shift
gpus=${GPUS:-8}

exec torchrun --nnodes="$NODES" --node-rank="$node" --nproc-per-node="$gpus" --max-restarts=3 \
  --master-addr="$MASTER" --master-port="${PORT:-29500}" --no-python \
  flowtrain fit "$@" --trainer.num_nodes="$NODES" --trainer.devices="$gpus"
