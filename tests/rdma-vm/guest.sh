#!/usr/bin/env bash
# Runs in the virtual machine, with the host's files: makes the devices, then runs the program.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root TERM=dumb LANG=C.UTF-8 IN_RDMA_VM=1 OUT=/run/out
# VM_NETWORK, VM_TIMEOUT, VM_FOLDER, VM_COMMAND and what run.sh was told to pass on.
. "$1/environment"
ulimit -l unlimited
ulimit -n 65536
ip link set lo up

case $VM_NETWORK in
  none) ;;
  lo) rdma link add rxe0 type rxe netdev lo ;;
  veth)
    # Two devices in one network namespace (rxe works in the first one only) whose packets really
    # cross a pair: rules that come before the local table send one address to the other over it.
    ip link add v0 mtu 4200 type veth peer name v1 mtu 4200
    ip addr add 10.9.0.1/32 dev v0
    ip addr add 10.9.0.2/32 dev v1
    cat > /run/veth-up <<'END'
#!/usr/bin/env bash
# Makes the pair's routes; needed again after one of its ends was down.
ip link set v0 up
ip link set v1 up
ip route replace 10.9.0.2/32 dev v0 src 10.9.0.1 table 101
ip route replace 10.9.0.1/32 dev v1 src 10.9.0.2 table 102
ip neigh replace 10.9.0.2 lladdr "$(cat /sys/class/net/v1/address)" dev v0 nud permanent
ip neigh replace 10.9.0.1 lladdr "$(cat /sys/class/net/v0/address)" dev v1 nud permanent
END
    chmod 755 /run/veth-up
    for interface in all v0 v1; do
      echo 1 > /proc/sys/net/ipv4/conf/$interface/accept_local
      echo 0 > /proc/sys/net/ipv4/conf/$interface/rp_filter
    done
    ip rule add pref 10 iif lo from 10.9.0.1 to 10.9.0.2 lookup 101
    ip rule add pref 11 iif lo from 10.9.0.2 to 10.9.0.1 lookup 102
    ip rule add pref 100 lookup local
    ip rule del pref 0
    /run/veth-up
    rdma link add rxe0 type rxe netdev v0
    rdma link add rxe1 type rxe netdev v1
    ;;
  eth)
    # The machine's own interface, for two machines; VM_ADDRESS is this one's.
    ip link set eth0 mtu 4200
    ip addr add "$VM_ADDRESS/24" dev eth0
    ip link set eth0 up
    rdma link add rxe0 type rxe netdev eth0
    ;;
esac
cd "$VM_FOLDER" || exit 127
timeout -k 5 "$VM_TIMEOUT" "${VM_COMMAND[@]}" < /dev/null
code=$?
[[ $code != 124 ]] || echo "vm: the program ran past $VM_TIMEOUT s" >&2
exit $code
