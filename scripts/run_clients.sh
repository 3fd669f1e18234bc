#!/usr/bin/env bash
# Start clients under torchrun, all in one launch; each rank is a client with a name of its own.
#
#   NCLIENT=2 CHECKPOINT=DIR MONITOR=http://127.0.0.1:8500 scripts/run_clients.sh \
#     --prompt "To be" --prompt "Once more" --max-new-tokens 64 [OPTION...]
#
# Options go to `torch-eaas generate`. Of several prompts each rank takes one. Servers and monitor
# may start later: a client waits for them, 60 seconds unless --wait says otherwise.
set -euo pipefail

NCLIENT=${NCLIENT:-1}
PYTHON=${PYTHON:-python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
: "${CHECKPOINT:?set CHECKPOINT to a checkpoint directory}"
: "${MONITOR:?set MONITOR to the URL of the monitor, http://HOST:PORT}"

# --: torchrun takes --monitor for a short form of its own option otherwise
# --parent 0: a client dies with the launch, even by kill -9
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$NCLIENT" \
  -m -- torch_eaas --parent 0 generate "$CHECKPOINT" --monitor="$MONITOR" "$@"
