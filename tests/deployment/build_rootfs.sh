#!/usr/bin/env bash
# Builds the Dockerfile's CPU target without a container engine or an image registry, starts the server in
# it, and checks that the image's health check and one completion succeed.
#
#   tests/deployment/build_rootfs.sh [WORK_FOLDER]      (root on Debian; about 5 GB in WORK_FOLDER)
#
# debootstrap creates a Debian system that replaces the base image `debian:bookworm-slim`. buildah runs every
# step of the Dockerfile on it in a chroot, without a daemon. Unlike in a container engine, the server runs in
# a chroot as the image's user, without its own namespaces or cgroups. The CUDA target is not built.
# The build uses PIP_FIND_LINKS (a folder) and PIP_CERT (a file) if they are set, for machines behind a mirror.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mkdir -p "${1:-/tmp/slipstream-rootfs}" && cd "${1:-/tmp/slipstream-rootfs}" && pwd)
port=${PORT:-18000}
base=localhost/slipstream-base
storage=(--root "$work/storage" --runroot "$work/run" --storage-driver overlay)

step() { printf '\n== %s\n' "$*"; }
for tool in debootstrap buildah; do
  command -v "$tool" > /dev/null || { echo "missing: $tool (apt-get install $tool)" >&2; exit 3; }
done
[ "$(id -u)" = 0 ] || { echo "must be root" >&2; exit 3; }

step "create a Debian system to replace the base image"
if [ ! -e "$work/base/etc/debian_version" ]; then
  debootstrap --variant=minbase bookworm "$work/base" > "$work/debootstrap.log"
fi
build=()
if [ -n "${PIP_CERT:-}" ] || [ -n "${PIP_FIND_LINKS:-}" ]; then
  echo "[global]" > "$work/base/etc/pip.conf"
  if [ -n "${PIP_CERT:-}" ]; then
    build+=(--volume "$PIP_CERT:/run/pip-cert.pem:ro")
    echo "cert = /run/pip-cert.pem" >> "$work/base/etc/pip.conf"
  fi
  if [ -n "${PIP_FIND_LINKS:-}" ]; then
    build+=(--volume "$PIP_FIND_LINKS:/run/wheels:ro" --build-arg TORCH_INDEX_URL=file:///run/wheels)
    echo "find-links = /run/wheels" >> "$work/base/etc/pip.conf"
  fi
fi
container=$(buildah "${storage[@]}" from scratch)
buildah "${storage[@]}" add --quiet "$container" "$work/base" / > /dev/null
buildah "${storage[@]}" commit --quiet --rm "$container" "$base" > /dev/null

step "build the Dockerfile's CPU target"
# buildah reads .dockerignore as a container engine does
buildah "${storage[@]}" build --isolation chroot --pull-never --format docker --target cpu \
  --build-arg "CPU_BASE=$base" "${build[@]}" --tag localhost/slipstream:cpu "$root"

step "check the image's settings"
buildah "${storage[@]}" inspect --type image localhost/slipstream:cpu > "$work/image.json"
python3 - "$work/image.json" <<'PYTHON'
import json, sys

image = json.load(open(sys.argv[1]))
config = image["Docker"]["config"]
assert config["User"] == "10001", config["User"]
assert config["Entrypoint"] == ["slipstream"] and config["Cmd"] == ["serve"]
assert "PYTHONSAFEPATH=1" in config["Env"]
assert config["StopSignal"] == "SIGTERM" and "8000/tcp" in config["ExposedPorts"]
assert "/ready" in config["Healthcheck"]["Test"][-1]
print("user 10001, entry point, safe path, stop signal, port and health check are correct")
PYTHON

step "start the server in the image, as the image's user"
container=$(buildah "${storage[@]}" from --pull-never localhost/slipstream:cpu)
mount=$(buildah "${storage[@]}" mount "$container")
echo "size of the root file system: $(du -shx "$mount" | cut -f1)"
mkdir -p "$mount/proc" "$mount/dev"
mount -t proc proc "$mount/proc"
mount --rbind /dev "$mount/dev"
mount --make-rslave "$mount/dev"
server=
cleanup() {
  [ -z "$server" ] || kill -KILL "$server" 2> /dev/null || true
  umount -l "$mount/dev" "$mount/proc" 2> /dev/null || true
  buildah "${storage[@]}" rm "$container" > /dev/null 2>&1 || true
}
trap cleanup EXIT
python3 - "$work/image.json" > "$work/environment" <<'PYTHON'
import json, sys

print("\n".join(json.load(open(sys.argv[1]))["Docker"]["config"]["Env"]))
PYTHON
mapfile -t environment < "$work/environment"
inside=(env -i "${environment[@]}" HOME=/data
  chroot --userspec=10001:10001 "$mount" /usr/bin/env --chdir=/data)
"${inside[@]}" slipstream serve --port "$port" > "$work/server.log" 2>&1 &
server=$!
for _ in $(seq 180); do
  curl --silent --fail --output /dev/null "http://127.0.0.1:$port/ready" && break
  kill -0 "$server" 2> /dev/null || { cat "$work/server.log" >&2; exit 1; }
  sleep 1
done
grep Serving "$work/server.log"
[ "$(stat --format=%u "/proc/$server")" = 10001 ] || { echo "the server runs as another user" >&2; exit 1; }

step "run the image's health check and a completion"
python3 - "$work/image.json" > "$work/health.py" <<'PYTHON'
import json, sys

kind, *command = json.load(open(sys.argv[1]))["Docker"]["config"]["Healthcheck"]["Test"]
assert kind == "CMD" and command[:2] == ["python", "-c"]
print(command[2])
PYTHON
"${inside[@]}" python -c "$(cat "$work/health.py")" && echo "healthy"
curl --silent --fail "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
  -d '{"model": "smollm2-135m", "prompt": "1, 2, 3, 4,", "max_tokens": 8, "temperature": 0}' | tee "$work/reply.json"
grep --quiet ' 5, 6' "$work/reply.json"

step "stop the server with SIGTERM"
kill -TERM "$server"
wait "$server" && echo "exit status 0"
server=
if "${inside[@]}" python -c "$(cat "$work/health.py")" 2> /dev/null; then
  echo "the health check passes although the server has stopped" >&2
  exit 1
fi
echo "the health check fails now, as it should"
