#!/usr/bin/env bash
# Runs a command again while it ends with what another start mends: 75, it was told to go and has
# saved; 76, another process of the run was lost; 128 + n, it was killed. At most RESTARTS times
# (100), after a pause of PAUSE seconds (10). SIGTERM goes on to the command and ends the loop.
#
#   scripts/until_done.sh python -m trainer.pretrain …
set -uo pipefail

told=''
trap 'told=yes; kill -TERM "$child" 2>/dev/null' TERM INT
for ((left = ${RESTARTS:-100}; ; left--)); do
    "$@" &
    child=$!
    wait "$child"
    code=$?
    # A signal ends the wait before the command has ended.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    if [ -n "$told" ] || [ "$left" -le 0 ]; then
        exit "$code"
    fi
    if [ "$code" -ne 75 ] && [ "$code" -ne 76 ] && [ "$code" -le 128 ]; then
        exit "$code"
    fi
    echo "$0: ended with $code, again in ${PAUSE:-10} s" >&2
    sleep "${PAUSE:-10}"
    if [ -n "$told" ]; then
        exit "$code"
    fi
done
