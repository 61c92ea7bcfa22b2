#!/usr/bin/env bash
# Restarts a command for as long as it ends with an exit code that a restart fixes: 75 (it received a
# signal and saved a checkpoint), 76 (another process of the run was lost), 128 + n (it was killed).
# RESTARTS is the largest number of restarts (100 if unset), PAUSE the seconds before each (10 if
# unset). SIGTERM is passed on to the command and ends the loop.
#
#   scripts/until_done.sh python -m trainer.pretrain …
set -uo pipefail

stopping=''
trap 'stopping=yes; kill -TERM "$child" 2>/dev/null' TERM INT
for ((left = ${RESTARTS:-100}; ; left--)); do
    "$@" &
    child=$!
    wait "$child"
    code=$?
    # A signal interrupts wait before the command has ended.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    if [ -n "$stopping" ] || [ "$left" -le 0 ]; then
        exit "$code"
    fi
    if [ "$code" -ne 75 ] && [ "$code" -ne 76 ] && [ "$code" -le 128 ]; then
        exit "$code"
    fi
    echo "$0: the command ended with $code, restarting in ${PAUSE:-10} s" >&2
    sleep "${PAUSE:-10}"
    if [ -n "$stopping" ]; then
        exit "$code"
    fi
done
