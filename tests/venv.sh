#!/usr/bin/env bash
# Make the development environment: venv.sh PYTHON FOLDER
# Debian ships venv apart from Python; where it is missing and we are root, it is installed.
set -euo pipefail
python=$1 folder=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "$python: found $("$python" --version 2>&1), expected Python 3.11 or newer (make PYTHON=...)" >&2
  exit 1
}
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  [ "$(id -u)" = 0 ] || { echo "$python: found no ensurepip, expected the package python3-venv" >&2; exit 1; }
  export DEBIAN_FRONTEND=noninteractive
  apt-get -o Acquire::Retries=3 update -q
  apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends python3-venv
fi
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
# pip tries a connection again by itself, but not a file that came cut off.
for round in 1 2 3; do
  "$folder/bin/python" -m pip install -q --require-hashes -r requirements/dev.txt && exit
  echo "try $round of 3 failed" >&2
  sleep 15
done
exit 1
