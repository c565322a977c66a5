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
  veth | rails)
    # Devices in one network namespace (rxe works in the first one only) whose packets really cross
    # pairs: rules that come before the local table send one address to the other over its pair.
    pairs=(v)
    [[ $VM_NETWORK != rails ]] || pairs+=(w)
    cat > /run/veth-up <<'END'
#!/usr/bin/env bash
# veth-up [PAIR]: makes a pair's routes; needed again after one of its ends was down.
pair=${1:-v} net=10.9.0 table=101
[[ $pair == v ]] || net=10.9.1 table=103
ip link set "${pair}0" up
ip link set "${pair}1" up
ip route replace $net.2/32 dev "${pair}0" src $net.1 table $table
ip route replace $net.1/32 dev "${pair}1" src $net.2 table $((table + 1))
ip neigh replace $net.2 lladdr "$(cat "/sys/class/net/${pair}1/address")" dev "${pair}0" nud permanent
ip neigh replace $net.1 lladdr "$(cat "/sys/class/net/${pair}0/address")" dev "${pair}1" nud permanent
END
    chmod 755 /run/veth-up
    echo 1 > /proc/sys/net/ipv4/conf/all/accept_local
    echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
    ip rule add pref 100 lookup local
    ip rule del pref 0
    device=0
    for pair in "${pairs[@]}"; do
      net=10.9.$((device / 2))
      ip link add "${pair}0" mtu 4200 type veth peer name "${pair}1" mtu 4200
      ip addr add $net.1/32 dev "${pair}0"
      ip addr add $net.2/32 dev "${pair}1"
      for interface in "${pair}0" "${pair}1"; do
        echo 1 > "/proc/sys/net/ipv4/conf/$interface/accept_local"
        echo 0 > "/proc/sys/net/ipv4/conf/$interface/rp_filter"
      done
      ip rule add pref $((10 + device)) iif lo from $net.1 to $net.2 lookup $((101 + device))
      ip rule add pref $((11 + device)) iif lo from $net.2 to $net.1 lookup $((102 + device))
      /run/veth-up "$pair"
      rdma link add rxe$device type rxe netdev "${pair}0"
      rdma link add rxe$((device + 1)) type rxe netdev "${pair}1"
      device=$((device + 2))
    done
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
