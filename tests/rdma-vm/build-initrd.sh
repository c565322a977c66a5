#!/usr/bin/env bash
# Makes boot/vmlinux and boot/initrd.cpio in $RDMA_VM_CACHE out of Debian's kernel package, which is
# unpacked, not installed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${RDMA_VM_CACHE:-$HOME/.cache/ferry-rdma-vm}
boot=$cache/boot
modules="crc32_generic crc32_pclmul crc32c_generic crc32c_intel libcrc32c virtio_pci virtio_net 9pnet_virtio 9p
  overlay qemu_fw_cfg ib_core ib_uverbs rdma_ucm rdma_rxe dummy veth sch_netem"
mkdir -p "$boot" "$cache/debs"

if [[ ! -d $cache/kernel/boot ]]; then
  # What linux-image-amd64 depends on; the cloud image has no rdma_rxe.
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')
  [[ -n $package ]] || { echo "apt knows no linux-image-amd64: run apt-get update" >&2; exit 1; }
  (cd "$cache/debs" && apt-get download -qq "$package")
  rm -rf "$cache/kernel.new"
  dpkg-deb -x "$cache/debs/${package}"_*.deb "$cache/kernel.new"
  mv "$cache/kernel.new" "$cache/kernel"
fi
version=$(ls "$cache/kernel/lib/modules")
depmod -b "$cache/kernel" "$version"

root=$(mktemp -d "$cache/initrd.XXXXXX")
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,dev,proc,sys,modules,lower,upper,newroot}
cp "$(command -v busybox)" "$root/bin/busybox"
ln -s busybox "$root/bin/sh"

# In the order in which they must be loaded, each once.
files=$(for module in $modules; do
  modprobe -d "$cache/kernel" -S "$version" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++')
for file in $files; do
  name=$(basename "${file%.xz}")
  case $file in
    *.xz) xz -dc "$file" > "$root/modules/$name" ;;
    *) cp "$file" "$root/modules/$name" ;;
  esac
  echo "$name" >> "$root/modules/order"
done
strip --strip-debug "$root"/modules/*.ko

install -m 755 "$here/init" "$root/init"
(cd "$root" && find . -print0 | cpio --null -o -H newc --quiet -R 0:0) > "$boot/initrd.new"
python3 "$here/extract-vmlinux.py" "$cache/kernel/boot/vmlinuz-$version" "$boot/vmlinux"
mv "$boot/initrd.new" "$boot/initrd.cpio"
