# shellcheck shell=bash
# Container images without a registry: built by buildah in the cache, imported into the cluster's containerd.
# Each image is a file $IMAGE_DIR/NAME.tar with the hash of its inputs beside it in NAME.inputs.

DEV_IMAGES=(expertmaps-operator expertmaps-runner expertmaps-s3 expertmaps-vllm-base)

buildah() { # its storage lies in the cache, so that layers are found again
  command buildah --root "$CACHE/buildah" --runroot /run/expertmaps-buildah --storage-driver overlay "$@" 7>&- 8>&-
}

# The build's own view of package registries: the host's certificates and pip settings, mounted, never copied.
pip_configuration() {
  local key value
  printf '[global]\ncert = /run/secrets/certificates\n'
  for key in index-url extra-index-url proxy timeout; do
    value=$(env -u PIP_CONFIG_FILE /usr/bin/env python3 -m pip config get "global.$key" 2>/dev/null) || value=
    [[ -z $value ]] || printf '%s = %s\n' "$key" "$value"
  done
  [[ -z ${PIP_INDEX_URL:-} ]] || printf 'index-url = %s\n' "$PIP_INDEX_URL"
}

# build_image NAME DOCKERFILE CONTEXT INPUTS_HASH [OPTION...]
build_image() {
  local name=$1 file=$2 context=$3 inputs=$4 started secrets; shift 4
  mkdir -p "$IMAGE_DIR"
  if [[ -e $IMAGE_DIR/$name.tar && $(cat "$IMAGE_DIR/$name.inputs" 2>/dev/null) == "$inputs" ]]; then return 0; fi
  lock_cache images
  if [[ -e $IMAGE_DIR/$name.tar && $(cat "$IMAGE_DIR/$name.inputs" 2>/dev/null) == "$inputs" ]]; then return 0; fi
  need_tools buildah
  started=$(seconds)
  secrets=$(mktemp -d)
  pip_configuration >"$secrets/pip.conf"
  cat "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" >"$secrets/certificates"
  if ! retry patiently "building the image $name" buildah build -q --layers --isolation chroot --network host \
    --format docker --ignorefile "$HERE/dockerignore" \
    --secret "id=pip.conf,src=$secrets/pip.conf" --secret "id=certificates,src=$secrets/certificates" \
    -f "$file" -t "$IMAGE_PREFIX/$name:dev" "$@" "$context"; then
    rm -rf "$secrets"
    die "the image $name could not be built"
  fi
  rm -rf "$secrets"
  rm -f "$IMAGE_DIR/$name.inputs" "$IMAGE_DIR/$name.tar" "$IMAGE_DIR/.$name.tar"
  buildah push -q "$IMAGE_PREFIX/$name:dev" "docker-archive:$IMAGE_DIR/.$name.tar:$IMAGE_PREFIX/$name:dev"
  mv "$IMAGE_DIR/.$name.tar" "$IMAGE_DIR/$name.tar"
  printf '%s\n' "$inputs" >"$IMAGE_DIR/$name.inputs"
  say "built $IMAGE_PREFIX/$name:dev in $(($(seconds) - started)) s"
}

bootstrap() { # bootstrap FOLDER: what a failed try left there goes first
  find "$1" -mindepth 1 -delete
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$1"
}

# A file system with Debian's own Python 3.11, made once.
base_image() {
  local tar=$CACHE/base-$BASE_VERSION.tar root started
  if [[ ! -e $tar ]]; then
    need_tools debootstrap
    lock_cache base
    started=$(seconds)
    root=$(mktemp -d -p "$CACHE" base.XXXXXX)
    chmod 755 "$root"
    retry patiently "making the base file system" bootstrap "$root" || { rm -rf "$root"; die "debootstrap failed"; }
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/usr/share/{doc,man,locale}/*
    tar -C "$root" --exclude './dev/*' --sort=name --numeric-owner -cf "$tar.new" .
    mv "$tar.new" "$tar"
    rm -rf "$root"
    say "built the base file system in $(($(seconds) - started)) s"
  fi
  build_context base "$tar" rootfs.tar $'FROM scratch\nADD rootfs.tar /\nENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nCMD ["/bin/sh"]\n' "$BASE_VERSION"
}

# build_context NAME FILE NAME_IN_CONTEXT DOCKERFILE INPUTS: an image of one file, from a folder of its own
build_context() {
  local context
  if [[ -e $IMAGE_DIR/$1.tar && $(cat "$IMAGE_DIR/$1.inputs" 2>/dev/null) == "$5" ]]; then return 0; fi
  context=$(mktemp -d -p "$CACHE" context.XXXXXX)
  ln "$2" "$context/$3"
  printf '%s' "$4" >"$context/Dockerfile"
  build_image "$1" "$context/Dockerfile" "$context" "$5"
  rm -rf "$context"
}

system_images() {
  build_context pause "$BIN/pause" pause $'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n' "$KUBERNETES_VERSION"
  build_context coredns "$BIN/coredns" coredns $'FROM scratch\nCOPY coredns /coredns\nENTRYPOINT ["/coredns"]\n' "$COREDNS_VERSION"
}

import_image() { # import_image NAME: skipped if the cluster has this very image
  local name=$1 mark=$STATE/run/$1.imported started
  started=$(seconds)
  ! cmp -s "$IMAGE_DIR/$name.inputs" "$mark" || return 0
  ctr images import "$IMAGE_DIR/$name.tar" >/dev/null
  cp "$IMAGE_DIR/$name.inputs" "$mark"
  say "imported $IMAGE_PREFIX/$name:dev in $(($(seconds) - started)) s"
}

cmd_images() {
  local name inputs base=$IMAGE_PREFIX/base:dev
  need_root
  need_tools buildah debootstrap tar
  base_image
  cd "$REPO" || die "no folder $REPO"
  inputs=$(hash_of tests/cluster/vllm-base.Dockerfile)
  build_image expertmaps-vllm-base tests/cluster/vllm-base.Dockerfile tests/cluster "$BASE_VERSION $inputs" --build-arg "BASE=$base"
  inputs=$(hash_of tests/cluster/s3.Dockerfile tests/cluster/s3-requirements.txt)
  build_image expertmaps-s3 tests/cluster/s3.Dockerfile tests/cluster "$BASE_VERSION $inputs" --build-arg "BASE=$base"
  inputs=$(hash_of rowmap_jobs requirements/runner.txt)
  build_image expertmaps-runner rowmap_jobs/Dockerfile . "$BASE_VERSION $inputs" --build-arg "BASE=$base"
  inputs=$(hash_of operator requirements/operator.txt rowmap_jobs/__init__.py rowmap_jobs/formats rowmap_jobs/hook)
  build_image expertmaps-operator operator/Dockerfile . "$BASE_VERSION $inputs" --build-arg "BASE=$base"
  if ! healthy; then say "no cluster is up: the images are in $IMAGE_DIR only"; return; fi
  lock_operation
  for name in "${DEV_IMAGES[@]}"; do import_image "$name"; done
  printf "$IMAGE_PREFIX/%s:dev\n" "${DEV_IMAGES[@]}"
}

cmd_load() {
  [[ -f ${1:-} ]] || die "usage: $0 load TAR (a docker or OCI archive)"
  healthy || die "no cluster is up"
  lock_operation
  ctr images import "$1"
}
