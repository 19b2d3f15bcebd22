# shellcheck shell=bash
# Start, supervision and removal of the cluster.

# --- the supervisor: a process apart from its caller that holds the machine-wide lock as long as the cluster lives ---

start_component() {
  local name=$1
  (exec 9>&- && cd "$STATE" && "component_$name") >>"$STATE/log/$name.log" 2>&1 </dev/null &
  PIDS[$name]=$!
  printf '%s\n' "$!" >"$STATE/run/$name.pid"
}

cmd_supervise() { # cluster __supervise STATE/
  local name
  STATE=${1%/}
  declare -gA PIDS=()
  exec 9>>"$LOCK"
  flock -w 5 9 || die "another cluster holds $LOCK"
  printf 'pid %s, state %s, since %(%F %T)T\n' "$$" "$STATE" -1 >"$LOCK"
  printf '%s\n' "$$" >"$STATE/run/supervisor.pid"
  trap 'kill "${PIDS[@]}" 2>/dev/null; exit 0' TERM INT
  for name in "${COMPONENTS[@]}"; do
    start_component "$name"
    # What comes next gives up quickly when it finds no API server.
    [[ $name != apiserver ]] || wait_until 120 kubectl get --raw /readyz || true
  done
  # Looking is surer than waiting for the next child: of two that end at once, the shell reports only one.
  while true; do
    sleep 2 9>&- & wait $! || true
    for name in "${COMPONENTS[@]}"; do
      kill -0 "${PIDS[$name]}" 2>/dev/null && continue
      printf '%(%F %T)T %s ended and is started again\n' -1 "$name"
      start_component "$name"
    done
  done
}

# --- removal: works from whatever a finished, broken or killed run left ---

command_line() { tr '\0' ' ' <"/proc/$1/cmdline"; } 2>/dev/null

our_processes() { # pids of components and container shims of this state folder, and of its supervisor
  local dir name
  for dir in /proc/[0-9]*; do
    { mapfile -d '' -t command <"$dir/cmdline"; } 2>/dev/null || continue
    [[ ${#command[@]} -gt 0 && "${command[*]} " == *"$STATE"[/\ ]* ]] || continue
    name=${command[0]##*/}
    case $name in
      etcd | kube-apiserver | kube-controller-manager | kube-scheduler | kubelet | kube-proxy) ;;
      containerd | containerd-shim* | runc) ;;
      *) [[ " ${command[*]} " == *" __supervise "* ]] || continue ;;
    esac
    printf '%s\n' "${dir#/proc/}"
  done
  for name in "$STATE"/run/*.pid; do
    [[ -e $name ]] || continue
    dir=$(<"$name")
    # A number may have gone to another process since: the start must name the component, or be our supervisor.
    if [[ $(command_line "$dir") == *"$STATE"* ]]; then printf '%s\n' "$dir"; fi
  done
}

container_processes() {
  local cgroup
  for cgroup in /sys/fs/cgroup/"$CGROUP_ROOT" /sys/fs/cgroup/*/"$CGROUP_ROOT"; do
    [[ -d $cgroup ]] && find "$cgroup" -name cgroup.procs -exec cat {} +
  done 2>/dev/null | sort -u
}

kill_all() { # kill_all LISTER: kill what it lists until it lists nothing
  local round pids
  for round in {1..60}; do
    mapfile -t pids < <("$1")
    [[ ${#pids[@]} -gt 0 ]] || return 0
    kill -KILL "${pids[@]}" 2>/dev/null || true
    sleep 0.1
  done
  die "these processes do not end after $round tries: ${pids[*]}"
}

state_mounts() { cut -d' ' -f5 /proc/self/mountinfo | grep -E "^$STATE/" | sort -r || true; }

check_state() {
  [[ $STATE == /* && ${#STATE} -le 60 ]] || die "EXPERTMAPS_STATE must be an absolute path of at most 60 characters"
  [[ ! -e $STATE || -e $STATE/.expertmaps-cluster || -z $(ls -A "$STATE") ]] ||
    die "$STATE is not a folder of this cluster; it is left alone"
}

remove_state() {
  local path name file
  # First the supervisor, so that it starts nothing again, then all at once: nothing here outlives the cluster.
  if [[ -e $STATE/run/supervisor.pid ]]; then
    path=$(<"$STATE/run/supervisor.pid")
    if [[ $(command_line "$path") == *"__supervise $STATE/"* ]]; then kill -KILL "$path" || true; fi
  fi
  kill_all our_processes
  kill_all container_processes
  while read -r path; do umount "$path" 2>/dev/null || umount -l "$path"; done < <(state_mounts)
  for path in /sys/fs/cgroup/"$CGROUP_ROOT" /sys/fs/cgroup/*/"$CGROUP_ROOT"; do
    [[ ! -d $path ]] || find "$path" -depth -type d -exec rmdir {} + || say "could not remove $path"
  done
  for name in "$BRIDGE" "$SERVICE_BRIDGE"; do
    [[ ! -d /sys/class/net/$name ]] || ip link del "$name"
  done
  # Ends of pods' networks whose namespace has not gone yet hang on no bridge any more: the kernel removes them.
  for name in ip ip6; do nft delete table "$name" kube-proxy 2>/dev/null || true; done
  # Sockets of the shims lie outside the state folder, under names that only they know.
  for file in "$STATE"/containerd/state/io.containerd.runtime.v2.task/k8s.io/*/address; do
    [[ ! -e $file ]] || rm -f "$(sed 's|^unix://||' "$file")"
  done
  # So do the notes of the network plugins.
  for file in /var/lib/cni/results/"$NETWORK"-*-eth0; do
    name=${file##*/"$NETWORK"-}
    rm -f "$file" "/var/lib/cni/results/cni-loopback-${name%-eth0}-lo"
  done
  [[ ! -d /var/log/containers ]] || find /var/log/containers -lname "$STATE/*" -delete
  if [[ -e $STATE/sysctl.saved ]]; then
    while read -r name path; do printf '%s' "$path" >"/proc/sys/$name" || true; done <"$STATE/sysctl.saved"
  fi
  [[ -z $(state_mounts) ]] || die "still mounted below $STATE: $(state_mounts | tr '\n' ' ')"
  rm -rf "$STATE"
}

# --- checks ---

lock_holder() { # prints who holds the machine-wide lock, false if nobody does
  mkdir -p "${LOCK%/*}"
  exec 9>>"$LOCK"
  if flock -n 9; then exec 9>&-; return 1; fi
  exec 9>&-
  cat "$LOCK"
}

service_answers() { [[ $(nft list map ip kube-proxy service-ips) == *"$DNS_IP . udp . 53"* ]]; }
node_ready() { [[ $(kubectl get node "$NODE_NAME" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}') == True ]]; }
dns_ready() { [[ $(kubectl -n kube-system get deployment coredns -o 'jsonpath={.status.readyReplicas}') == 1 ]]; }

healthy() {
  local holder
  holder=$(lock_holder) && [[ $holder == *"state $STATE,"* ]] || return 1
  { kubectl get --raw /readyz && node_ready && dns_ready && service_answers; } >/dev/null 2>&1
}

check_ports() {
  local port owner
  for port in "$API_PORT" "$ETCD_PORT" "$ETCD_PEER_PORT" "$KUBELET_PORT"; do
    owner=$(ss -Hltnp "sport = :$port" | sed -n 's/.*users:((\(.*\)))$/\1/p')
    [[ -z $owner ]] || die "port $port is taken by $owner"
  done
  for port in "$POD_CIDR" "$SERVICE_CIDR"; do
    owner=$(ip -4 route show "$port")
    [[ -z $owner ]] || die "this machine already has a route for $port: $owner"
  done
}

# --- network ---

set_sysctl() { # set_sysctl PATH VALUE, remembering what was there
  [[ -e /proc/sys/$1 ]] || return 0
  printf '%s %s\n' "$1" "$(<"/proc/sys/$1")" >>"$STATE/sysctl.saved"
  [[ -z $2 ]] || printf '%s' "$2" >"/proc/sys/$1"
}

start_network() {
  modprobe br_netfilter 2>/dev/null || true
  set_sysctl net/ipv4/ip_forward 1
  # Answers between two pods on the bridge must pass the address translation of Services.
  set_sysctl net/bridge/bridge-nf-call-iptables 1
  # The kubelet sets these.
  set_sysctl vm/overcommit_memory ''
  set_sysctl kernel/panic ''
  set_sysctl kernel/panic_on_oops ''
  ip link add "$BRIDGE" type bridge
  ip address add "$NODE_IP/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  ip link add "$SERVICE_BRIDGE" type bridge
  ip link set "$SERVICE_BRIDGE" up
  ip route add "$SERVICE_CIDR" dev "$SERVICE_BRIDGE"
}

start_cgroups() {
  local controller
  if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
    mkdir -p "/sys/fs/cgroup/$CGROUP_ROOT"
    return
  fi
  for controller in /sys/fs/cgroup/*/; do
    [[ -e $controller/cgroup.procs ]] && mkdir -p "$controller$CGROUP_ROOT"
    if [[ -e $controller/$CGROUP_ROOT/cpuset.cpus ]]; then # an empty set takes no process
      cat "$controller/cpuset.cpus" >"$controller/$CGROUP_ROOT/cpuset.cpus"
      cat "$controller/cpuset.mems" >"$controller/$CGROUP_ROOT/cpuset.mems"
    fi
  done
}

# --- up, down, status ---

await() { # await SECONDS WHAT LOG COMMAND...
  local limit=$1 what=$2 log=$3; shift 3
  wait_until "$limit" "$@" && return
  say "--- the end of $STATE/log/$log.log"
  tail -n 15 "$STATE/log/$log.log" >&2 || true
  die "$what after $limit s; it is left as it is ($STATE/log), and up starts afresh"
}

cmd_up() {
  local holder started
  need_root
  started=$(seconds)
  need_tools containerd runc nft ip ss openssl flock
  check_state
  binaries_complete || die "binaries are missing in $BIN (run: $0 build)"
  lock_operation
  if healthy; then say "the cluster is up already"; return; fi
  if holder=$(lock_holder) && [[ $holder != *"state $STATE,"* ]]; then
    die "another cluster is up on this machine: $holder (end it with EXPERTMAPS_STATE set to its folder: $0 down)"
  fi
  system_images
  remove_state
  check_ports
  mkdir -p "$STATE"
  touch "$STATE/.expertmaps-cluster"
  write_configuration
  write_certificates 2>"$STATE/log/openssl.log" || die "no certificates: $(tail -n 3 "$STATE/log/openssl.log")"
  start_network
  start_cgroups
  setsid "$HERE/cluster" __supervise "$STATE/" >>"$STATE/log/supervisor.log" 2>&1 </dev/null 7>&- 8>&- &
  await 90 "containerd does not answer" containerd ctr version
  import_image pause
  import_image coredns
  await 180 "the API server is not ready" apiserver kubectl get --raw /readyz
  await 120 "the node is not ready" kubelet node_ready
  kubectl apply -f "$HERE/manifests/coredns.yaml" >/dev/null
  await 120 "CoreDNS is not ready" kubelet dns_ready
  await 60 "kube-proxy does not know CoreDNS" proxy service_answers
  say "the cluster is up after $(($(seconds) - started)) s; eval \"\$($0 env)\""
}

cmd_down() {
  local holder
  need_root
  check_state
  lock_operation
  if holder=$(lock_holder) && [[ $holder != *"state $STATE,"* ]]; then
    die "the cluster that is up has another folder: $holder"
  fi
  remove_state
  say "no cluster is up; the cache in $CACHE is kept"
}

cmd_status() {
  if healthy; then say "up: $(cat "$LOCK")"; return; fi
  lock_holder >/dev/null && die "not healthy: $(cat "$LOCK")"
  die "no cluster is up"
}

cmd_env() {
  # shellcheck disable=SC2016  # the caller's shell expands it
  printf 'export KUBECONFIG=%q\nexport PATH=%q:"$PATH"\n' "$STATE/admin.kubeconfig" "$BIN"
}
