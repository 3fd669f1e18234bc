#!/usr/bin/env bash
# Start expert servers under torchrun, each in a launch of its own: torchrun ends a whole launch when
# one of its processes dies, and a server must be able to die alone.
#
#   NSERVER=3 COPIES=2 CHECKPOINT=DIR MONITOR=http://127.0.0.1:8500 scripts/run_servers.sh [OPTION...]
#
# Further options go to `torch-eaas server`. SIGTERM or SIGINT drains all servers and ends the script.
set -euo pipefail

NSERVER=${NSERVER:-1}
COPIES=${COPIES:-1}
PYTHON=${PYTHON:-python}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
: "${CHECKPOINT:?set CHECKPOINT to a checkpoint directory}"
: "${MONITOR:?set MONITOR to the URL of the monitor, http://HOST:PORT}"

launches=()
stop() {
  local launch servers
  for launch in "${launches[@]}"; do
    # the server itself: torchrun would call a launch that it was told to stop a failure
    servers=$(cat "/proc/$launch/task/$launch/children" 2>/dev/null || true)
    # shellcheck disable=SC2086  # several pids
    kill -TERM ${servers:-$launch} 2>/dev/null || true
  done
}
trap stop TERM INT

for ((i = 0; i < NSERVER; i++)); do
  # --: torchrun takes --monitor for a short form of its own option otherwise
  # --parent 0: the server dies with its launch, the launch with this script, even by kill -9
  "$PYTHON" -m torch_eaas.cli.parent $$ "$PYTHON" -m torch.distributed.run \
    --standalone --nproc-per-node=1 -m -- torch_eaas --parent 0 server "$CHECKPOINT" \
    --monitor="$MONITOR" --share="$i/$NSERVER" --copies="$COPIES" --name="server-$i" "$@" &
  launches+=($!)
done

failed=0
for launch in "${launches[@]}"; do
  # a signal interrupts wait, which then has to be called again
  while kill -0 "$launch" 2>/dev/null; do
    wait "$launch" || true
  done
  wait "$launch" || failed=1
done
exit "$failed"
