#!/usr/bin/env bash
# Train on several nodes: sbatch --nodes=4 scripts/slurm_train.sh [options of torchtitan.train]
#
# One task per node starts that node's processes by run_train.sh. Two minutes before the time is up SLURM signals this
# script; the job then saves and ends with 0, and submitting it again goes on from there (--checkpoint.enable).
#SBATCH --job-name=torchtitan
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:USR1@120
set -euo pipefail

# SLURM runs a copy of this script; where the original lies, and so the tree, its controller knows.
script=$(scontrol show job "${SLURM_JOB_ID:-}" 2>/dev/null | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
root="${TORCHTITAN_ROOT:-$(cd "$(dirname "${script:-${BASH_SOURCE[0]}}")/.." && pwd)}"
export NNODES="${SLURM_JOB_NUM_NODES:-1}" RDZV_ID="${SLURM_JOB_ID:-torchtitan}"
export NGPU="${NGPU:-${SLURM_GPUS_ON_NODE:-8}}" MASTER_PORT="${MASTER_PORT:-29500}"
MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" | head -n 1)
export MASTER_ADDR

srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec "$0" "$@"' "$root/run_train.sh" "$@" &
job=$!
# srun passes USR1 on to the tasks; run_train.sh passes it on to its workers as the wish to stop.
trap 'kill -USR1 "$job"' USR1 TERM
code=0
wait "$job" || code=$?
while kill -0 "$job" 2>/dev/null; do # a signal ended the wait, not the job
  code=0
  wait "$job" || code=$?
done
exit "$code"
