#!/usr/bin/env bash
# A container engine on one plain Debian machine (root), and the images' base where no registry answers.
# Does nothing that is done already; `make test-compose` calls it.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=python:3.11-slim-bookworm

packages() { # of Debian, where one of their commands is missing: packages COMMAND PACKAGE...
    ! command -v "$1" >/dev/null || return 0
    shift
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

packages dockerd docker.io iptables
docker compose version >/dev/null 2>&1 || packages docker-compose docker-compose
if ! docker info >/dev/null 2>&1; then
    setsid dockerd </dev/null >/var/log/dockerd.log 2>&1 &
    for _ in $(seq 150); do
        ! docker info >/dev/null 2>&1 || break
        sleep 0.2
    done
    docker info >/dev/null || { echo "dockerd did not come up: see /var/log/dockerd.log" >&2; exit 1; }
fi

docker image inspect "$base" >/dev/null 2>&1 || docker pull -q "$base" >/dev/null 2>&1 || {
    echo "no registry gives $base: making one like it, with wheels from this machine's pip" >&2
    packages debootstrap debootstrap
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >/dev/null
    tar -C "$root" -c . | docker import - "$base" >/dev/null
    make -s wheels
}
