#!/usr/bin/env bash
# Train: ./run_train.sh [options of torchtitan.train]
#
#   NGPU         processes on this machine (default: its GPUs, or 2 on a CPU)
#   CONFIG_FILE  TOML to start from (default: the Llama 3 debug model)
#   LOG_RANK     local ranks whose output is shown, comma-separated (default: 0)
#   TRAIN_FILE   module or .py file to run (default: torchtitan.train)
#   PYTHON       interpreter to use (default: the active environment's, else .venv, made on the first start)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, RDZV_ID, RDZV_BACKEND, MAX_RESTARTS: torchrun's, for several machines
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
use_environment train
PYTHONSAFEPATH=1 exec "$PYTHON" -m torchtitan.tools.launch "$@"
