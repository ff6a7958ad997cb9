#!/usr/bin/env bash
# A Slurm of one machine, for tests, on a plain Debian (root): installed if absent, started under DIR.
#   one-machine.sh start DIR    one-machine.sh stop DIR
set -euo pipefail
action=$1 folder=$(realpath -m "$2")

start() {
    command -v slurmctld >/dev/null || {
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
    }
    mkdir -p "$folder/ctld" "$folder/d"
    host=$(hostname -s) cores=$(nproc)
    cat >"$folder/slurm.conf" <<CONF
ClusterName=jigsaw
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
MpiDefault=none
SwitchType=switch/none
StateSaveLocation=$folder/ctld
SlurmdSpoolDir=$folder/d
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cores State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    install -d -o munge -g munge /run/munge
    pgrep -x munged >/dev/null || runuser -u munge -- /usr/sbin/munged
    SLURM_CONF=$folder/slurm.conf slurmctld </dev/null >"$folder/ctld.out" 2>&1
    SLURM_CONF=$folder/slurm.conf slurmd -f "$folder/slurm.conf" </dev/null >"$folder/d.out" 2>&1
    for _ in $(seq 100); do
        SLURM_CONF=$folder/slurm.conf sinfo -h -o %t 2>/dev/null | grep -qx idle && return
        sleep 0.2
    done
    tail -n 5 "$folder/slurmctld.log" "$folder/slurmd.log" >&2
    echo "Slurm did not come up: see $folder" >&2
    exit 1
}

stop() {
    for name in slurmd slurmctld; do
        [ ! -f "$folder/$name.pid" ] || kill "$(cat "$folder/$name.pid")" 2>/dev/null || true
    done
}

"$action"
