# shellcheck shell=bash
# Debian packages that the other subcommands use.

PACKAGES=(
  containerd runc containernetworking-plugins nftables iproute2 conntrack procps util-linux openssl kmod
  buildah debootstrap ca-certificates
  gcc libc6-dev g++ python3 python3-venv python3-dev libnuma1 libgomp1
)

cmd_install() {
  need_root
  local package missing=()
  for package in "${PACKAGES[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  if [[ ${#missing[@]} -eq 0 ]]; then say "all packages are installed"; return; fi
  retry apt-get update -q
  # A package's own service must not start: the cluster runs its own containerd.
  local policy=/usr/sbin/policy-rc.d made=
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod 755 "$policy"; made=yes
  fi
  local status=0
  export DEBIAN_FRONTEND=noninteractive
  # A machine that just booted may be installing something by itself.
  retry apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "${missing[@]}" || status=$?
  [[ -z $made ]] || rm -f "$policy"
  return "$status"
}
