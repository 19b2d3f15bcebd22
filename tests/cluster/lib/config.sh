# shellcheck shell=bash
# shellcheck disable=SC2034  # other parts use these
# Certificates, configuration files and the command line of each component. Everything lies in $STATE.

BRIDGE=em-pods                  # pods and the node's own address
SERVICE_BRIDGE=em-services      # empty: it only holds the route of the Service range
NETWORK=expertmaps-pods
POD_CIDR=10.244.0.0/24
NODE_IP=10.244.0.1
SERVICE_CIDR=10.96.0.0/16
DNS_IP=10.96.0.10
API_PORT=26443
ETCD_PORT=26379
ETCD_PEER_PORT=26380
KUBELET_PORT=26250
CGROUP_ROOT=expertmaps

# Start order. The rest of the file has one function for each: component_NAME.
COMPONENTS=(containerd etcd apiserver controller-manager scheduler kubelet proxy)

certificate() { # certificate FILE SUBJECT ALTERNATIVE_NAMES
  local file=$STATE/pki/$1
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$file.key" -out "$file.csr" -subj "$2"
  openssl x509 -req -in "$file.csr" -CA "$STATE/pki/ca.crt" -CAkey "$STATE/pki/ca.key" -CAcreateserial -days 365 \
    -out "$file.crt" -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "${3:-DNS:$1}")
}

write_certificates() {
  local name
  mkdir -p "$STATE/pki"
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$STATE/pki/ca.key" \
    -out "$STATE/pki/ca.crt" -subj /CN=expertmaps-cluster-ca -days 365
  certificate apiserver /CN=kube-apiserver \
    "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local,DNS:localhost,IP:127.0.0.1,IP:${SERVICE_CIDR%.0.0/16}.0.1,IP:$NODE_IP"
  certificate admin /O=system:masters/CN=admin
  certificate controller-manager /CN=system:kube-controller-manager
  certificate scheduler /CN=system:kube-scheduler
  certificate proxy /CN=system:kube-proxy
  certificate kubelet "/O=system:nodes/CN=system:node:$NODE_NAME" "DNS:$NODE_NAME,IP:$NODE_IP"
  certificate kubelet-client /O=system:masters/CN=apiserver-kubelet-client
  openssl ecparam -name prime256v1 -genkey -noout -out "$STATE/pki/service-accounts.key"
  openssl ec -in "$STATE/pki/service-accounts.key" -pubout -out "$STATE/pki/service-accounts.pub"
  for name in admin controller-manager scheduler proxy kubelet; do
    cat >"$STATE/$name.kubeconfig" <<YAML
apiVersion: v1
kind: Config
current-context: expertmaps
contexts: [{name: expertmaps, context: {cluster: expertmaps, user: $name}}]
clusters:
- name: expertmaps
  cluster:
    server: https://127.0.0.1:$API_PORT
    certificate-authority-data: $(base64 -w0 "$STATE/pki/ca.crt")
users:
- name: $name
  user:
    client-certificate-data: $(base64 -w0 "$STATE/pki/$name.crt")
    client-key-data: $(base64 -w0 "$STATE/pki/$name.key")
YAML
  done
}

write_configuration() {
  mkdir -p "$STATE/log" "$STATE/cni" "$STATE/run"
  # Requests of service accounts, without those that belong to the cluster itself.
  cat >"$STATE/audit-policy.yaml" <<YAML
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
YAML
  cat >"$STATE/cni/10-pods.conflist" <<JSON
{"cniVersion": "0.4.0", "name": "$NETWORK", "plugins": [
  {"type": "bridge", "bridge": "$BRIDGE", "isGateway": true, "hairpinMode": true, "ipam": {
    "type": "host-local", "dataDir": "$STATE/cni-addresses",
    "ranges": [[{"subnet": "$POD_CIDR", "rangeStart": "${NODE_IP%.1}.10"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
JSON
  # restrict_oom_score_adj: a machine without CAP_SYS_RESOURCE cannot lower the score of a sandbox.
  cat >"$STATE/containerd.toml" <<TOML
version = 2
root = "$STATE/containerd/root"
state = "$STATE/containerd/state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "$STATE/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "$STATE/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  sandbox_image = "$IMAGE_PREFIX/pause:dev"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$STATE/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "$STATE/runc"
TOML
  cat >"$STATE/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $NODE_IP
port: $KUBELET_PORT
healthzPort: 0
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $STATE/pki/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: $STATE/pki/kubelet.crt
tlsPrivateKeyFile: $STATE/pki/kubelet.key
containerRuntimeEndpoint: unix://$STATE/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /$CGROUP_ROOT
failSwapOn: false
makeIPTablesUtilChains: false
enforceNodeAllocatable: []
evictionHard: {memory.available: "200Mi", nodefs.available: "1%", imagefs.available: "1%"}
imageGCHighThresholdPercent: 100
resolvConf: /etc/resolv.conf
clusterDNS: [$DNS_IP]
clusterDomain: cluster.local
podLogsDir: $STATE/pod-logs
volumePluginDir: $STATE/volume-plugins
YAML
}

component_etcd() {
  exec "$BIN/etcd" --data-dir "$STATE/etcd" --unsafe-no-fsync \
    --listen-client-urls "http://127.0.0.1:$ETCD_PORT" --advertise-client-urls "http://127.0.0.1:$ETCD_PORT" \
    --listen-peer-urls "http://127.0.0.1:$ETCD_PEER_PORT" --initial-advertise-peer-urls "http://127.0.0.1:$ETCD_PEER_PORT" \
    --initial-cluster "default=http://127.0.0.1:$ETCD_PEER_PORT"
}

component_apiserver() {
  exec "$BIN/kube-apiserver" "--etcd-servers=http://127.0.0.1:$ETCD_PORT" \
    --bind-address=0.0.0.0 "--secure-port=$API_PORT" "--advertise-address=$NODE_IP" \
    "--service-cluster-ip-range=$SERVICE_CIDR" --authorization-mode=Node,RBAC \
    --enable-admission-plugins=NodeRestriction --allow-privileged=true "--client-ca-file=$STATE/pki/ca.crt" \
    "--tls-cert-file=$STATE/pki/apiserver.crt" "--tls-private-key-file=$STATE/pki/apiserver.key" \
    --service-account-issuer=https://kubernetes.default.svc \
    "--service-account-key-file=$STATE/pki/service-accounts.pub" \
    "--service-account-signing-key-file=$STATE/pki/service-accounts.key" \
    "--kubelet-client-certificate=$STATE/pki/kubelet-client.crt" \
    "--kubelet-client-key=$STATE/pki/kubelet-client.key" "--kubelet-certificate-authority=$STATE/pki/ca.crt" \
    --kubelet-preferred-address-types=InternalIP "--audit-policy-file=$STATE/audit-policy.yaml" \
    "--audit-log-path=$STATE/log/audit.log" --audit-log-maxsize=100 --audit-log-maxbackup=2
}

component_controller-manager() {
  exec "$BIN/kube-controller-manager" "--kubeconfig=$STATE/controller-manager.kubeconfig" --secure-port=0 \
    "--service-account-private-key-file=$STATE/pki/service-accounts.key" "--root-ca-file=$STATE/pki/ca.crt" \
    --use-service-account-credentials=true --allocate-node-cidrs=false --leader-elect=false
}

component_scheduler() {
  exec "$BIN/kube-scheduler" "--kubeconfig=$STATE/scheduler.kubeconfig" --secure-port=0 --leader-elect=false
}

component_containerd() { exec containerd --config "$STATE/containerd.toml"; }

component_kubelet() {
  exec "$BIN/kubelet" "--config=$STATE/kubelet.yaml" "--kubeconfig=$STATE/kubelet.kubeconfig" \
    "--hostname-override=$NODE_NAME" "--node-ip=$NODE_IP" "--root-dir=$STATE/kubelet"
}

component_proxy() {
  exec "$BIN/kube-proxy" "--kubeconfig=$STATE/proxy.kubeconfig" "--hostname-override=$NODE_NAME" \
    --proxy-mode=nftables "--cluster-cidr=$POD_CIDR" --metrics-bind-address= --healthz-bind-address= \
    --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0s --conntrack-tcp-timeout-close-wait=0s
}
