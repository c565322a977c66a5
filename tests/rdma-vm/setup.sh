#!/usr/bin/env bash
# Installs what the virtual machine needs from Debian's packages and builds its kernel and initrd
# into $RDMA_VM_CACHE (about a minute, once).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${RDMA_VM_CACHE:-$HOME/.cache/ferry-rdma-vm}

if [[ $(id -u) == 0 ]]; then sudo=(); else sudo=(sudo); fi
# The second line is what programs find in the guest, whose root is the host's.
packages=(qemu-system-x86 busybox-static kmod cpio binutils python3 xz-utils
  iproute2 rdma-core ibverbs-providers ibverbs-utils perftest)
if ! dpkg --status "${packages[@]}" >/dev/null 2>&1; then
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}"
fi

# An initrd of other scripts than these would not fit them.
made_from=$(cat "$here"/{init,build-initrd.sh,extract-vmlinux.py} | sha256sum)
if [[ $(cat "$cache/boot/made-from" 2>/dev/null) != "$made_from" ]]; then
  "$here/build-initrd.sh"
  echo "$made_from" > "$cache/boot/made-from"
fi
