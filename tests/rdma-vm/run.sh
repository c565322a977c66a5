#!/usr/bin/env bash
# run.sh [-t SECONDS] [-m MEMORY] [-c CPUS] [-n none|lo|veth|rails|eth] [-o FOLDER] [-e NAME=VALUE]... PROGRAM [ARGUMENT...]
# Boots a Debian kernel with rdma_rxe in QEMU (software emulation) and runs PROGRAM in it.
# The guest's root is the host's, read-only under a layer that is thrown away, so that every path,
# library and tool works as it is. What the guest writes to $OUT arrives in FOLDER. Its output comes
# on stdout as it is made. Exit code: the program's; 124: it ran past SECONDS; 125: the machine
# failed (the end of its console goes to stderr); 126: the machine hung. Where the guest's kernel says
# that it was a processor which hung, the machine is started anew, once: emulated ones do at times.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
boot=${RDMA_VM_CACHE:-$HOME/.cache/ferry-rdma-vm}/boot
# Longer than booting ever takes: after this the machine hangs.
boot_allowance=120
arguments=("$@")
seconds=120 memory=2G cpus=2 network=lo out= variables=()
while getopts t:m:c:n:o:e: option; do
  case $option in
    t) seconds=$OPTARG ;; m) memory=$OPTARG ;; c) cpus=$OPTARG ;; n) network=$OPTARG ;;
    o) out=$OPTARG ;; e) variables+=("$OPTARG") ;; *) exit 125 ;;
  esac
done
shift $((OPTIND - 1))
[[ $# -ge 1 ]] || { sed -n '2,8s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 125; }
[[ -e $boot/initrd.cpio ]] || { echo "vm: there is no initrd in $boot: run $here/setup.sh" >&2; exit 125; }

work=$(mktemp -d "${TMPDIR:-/tmp}/rdma-vm.XXXXXX")
trap 'rm -rf "$work"' EXIT
command=("$@")
case $1 in */*) command[0]=$(realpath "$1") || exit 125 ;; esac
install -m 755 "$here/guest.sh" "$work/guest.sh"
{
  printf 'VM_NETWORK=%q\nVM_TIMEOUT=%q\nVM_FOLDER=%q\nVM_COMMAND=(' "$network" "$seconds" "$PWD"
  printf '%q ' "${command[@]}"
  echo ')'
  for variable in "${variables[@]+"${variables[@]}"}"; do printf 'export %q\n' "$variable"; done
} > "$work/environment"
if [[ -n $out ]]; then mkdir -p "$out"; out=$(realpath "$out"); else out=$work/out; mkdir "$out"; fi
: > "$work/code"

# The processor model is one that the emulator is fast with; its newest is 3 to 5 times slower here.
setpriv --pdeathsig KILL timeout --foreground -k 5 $((seconds + boot_allowance)) \
  setpriv --pdeathsig KILL qemu-system-x86_64 \
  -M pc,usb=off -accel tcg,thread=multi,tb-size=256 -cpu Nehalem-v1 \
  -smp "$cpus" -m "$memory" -nodefaults -no-user-config -no-reboot -display none -monitor none \
  -kernel "$boot/vmlinux" -initrd "$boot/initrd.cpio" \
  -append "console=ttyS0 panic=-1 oops=panic mitigations=off nokaslr no_timer_check random.trust_cpu=on audit=0 apparmor=0 run_folder=$work" \
  -chardev file,id=console,path="$work/console.log" -serial chardev:console \
  -chardev stdio,id=output,signal=off -serial chardev:output \
  -chardev file,id=code,path="$work/code" -serial chardev:code \
  -virtfs local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap \
  -virtfs local,path="$out",mount_tag=out,security_model=none \
  -device isa-debug-exit,iobase=0xf4,iosize=0x04 \
  ${VM_PID_FILE:+-pidfile "$VM_PID_FILE"} ${VM_QEMU_ARGUMENTS:-} \
  < /dev/null 2> "$work/qemu.log" &
machine=$!
trap 'kill "$machine" 2>/dev/null; wait; rm -rf "$work"; exit 125' TERM INT HUP
wait "$machine"
ended=$?
code=$(tr -d '\r' < "$work/code" | sed -n 's/^VM_EXIT_CODE=\([0-9]*\).*/\1/p' | tail -1)
if [[ -z $code ]]; then
  case $ended in 124 | 137) code=126 ;; *) code=125 ;; esac
  {
    echo "vm: no exit code from the guest (qemu ended with $ended); the end of its console:"
    tail -40 "$work/console.log"
    cat "$work/qemu.log"
  } >&2
  if [[ $code == 126 && -z ${VM_IS_SECOND:-} ]] &&
    grep -qE 'soft lockup|detected stalls? on CPUs?|self-detected stall' "$work/console.log"; then
    echo "vm: a processor of the emulated machine hung; it is started anew" >&2
    rm -rf "$work"
    VM_IS_SECOND=1 exec "${BASH_SOURCE[0]}" "${arguments[@]}"
  fi
fi
exit "$code"
