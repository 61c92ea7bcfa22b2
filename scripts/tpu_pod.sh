#!/usr/bin/env bash
# Runs a command on all hosts of a TPU slice as a systemd service: it survives the terminal, receives
# SIGTERM when the machine shuts down, and is restarted after transient failures. See docs/tpu.md.
#
#   scripts/tpu_pod.sh install NAME ZONE [EXTRA]     install this clone with EXTRA (default: tpu)
#   scripts/tpu_pod.sh start   NAME ZONE FLAGS…      run python -m trainer.pretrain FLAGS
#   scripts/tpu_pod.sh status  NAME ZONE             print each host's state
#   scripts/tpu_pod.sh logs    NAME ZONE             follow the log of the first host
#   scripts/tpu_pod.sh stop    NAME ZONE             save a checkpoint and stop
#
# If IMAGE, an image of docker/Dockerfile.trainer, is set, install pulls it and start runs it. start
# passes on LIBTPU_INIT_ARGS, the flags of the TPU's compiler, if it is set.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '5,12s/^# *//p' "$0" >&2
    exit 2
fi
action=$1 name=$2 zone=$3
shift 3
unit=palimpsest

on() { # HOSTS COMMAND
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$1" --command="$2"
}

case $action in
install)
    if [ -n "${IMAGE:-}" ]; then
        on all "sudo gcloud auth configure-docker --quiet $(printf %q "${IMAGE%%/*}")
            sudo docker pull --quiet $(printf %q "$IMAGE")"
        exit
    fi
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    git -C "$(dirname "$0")/.." archive --format=tar.gz --output="$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$name:$unit.tar.gz" --zone="$zone" --worker=all
    # The python3 of Ubuntu 22.04 is 3.10, which is too old.
    on all "set -e; mkdir -p $unit; tar --extract --gzip --file=$unit.tar.gz --directory=$unit
        if ! test -x $unit/.venv/bin/python; then
            python=\$(command -v python3.13 python3.12 python3.11 | head --lines=1)
            if test -z \"\$python\"; then
                sudo apt-get --quiet update; sudo apt-get --quiet --yes install python3.11-venv
                python=python3.11
            fi
            \"\$python\" -m venv $unit/.venv
        fi
        cd $unit; .venv/bin/pip install --quiet --constraint constraints.txt '.[${1:-tpu}]' gcsfs"
    ;;
start)
    flags=$(printf ' %q' "$@" --processes.coordinator=auto)
    run="--uid=\"\$(id -u)\" --working-directory=\"\$HOME\" \
        --setenv=LIBTPU_INIT_ARGS=$(printf %q "${LIBTPU_INIT_ARGS:-}") \
        \"\$HOME/$unit/.venv/bin/python\" -m trainer.pretrain$flags"
    if [ -n "${IMAGE:-}" ]; then
        # The client passes SIGTERM on and ends with the exit code of the container. /tmp is the
        # host's, for --data.local_dir and for compiled programs.
        run="--property=ExecStartPre='-/usr/bin/docker rm --force $unit' \
            /usr/bin/docker run --name=$unit --rm --privileged --net=host --user=root \
            --volume=/tmp:/tmp --env=JAX_COMPILATION_CACHE_DIR=/tmp/$unit-xla \
            --env=LIBTPU_INIT_ARGS=$(printf %q "${LIBTPU_INIT_ARGS:-}") \
            $(printf %q "$IMAGE") trainer.pretrain$flags"
    fi
    # Exit codes 1 and 2 are errors that a restart does not fix.
    on all "sudo systemd-run --unit=$unit --collect \
        --property=Restart=on-failure --property=RestartPreventExitStatus='1 2' \
        --property=RestartSec=10 --property=StartLimitIntervalSec=0 --property=TimeoutStopSec=300 \
        $run"
    ;;
status)
    on all "systemctl show $unit --property=ActiveState,SubState,NRestarts,ExecMainStatus"
    ;;
logs)
    on 0 "journalctl --unit=$unit --follow --lines=50 --output=cat"
    ;;
stop)
    on all "sudo systemctl stop $unit"
    ;;
*)
    echo "$0: unknown action $action: use install, start, status, logs or stop" >&2
    exit 2
    ;;
esac
