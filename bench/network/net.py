"""A real network on one machine: hosts as network namespaces behind a router, every port held to its rate both ways.

Token buckets at both ends of each host's veth; packets are routed, because a bridge keeps them charged to their sender's
socket. Nothing is connected to the outside. Needs root and iproute2.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PREFIX = f"aurora{os.getpid()}"
SUBNET = "10.78.0"
PAYLOAD = 1448 / 1514  # of the configured rate: what TCP leaves of a full Ethernet frame
BURST_S = 0.0032  # that a port lets pass at once after a rest; a longer one hides what ranks lose between messages
SEGMENT = 1 << 16  # bytes of the largest packet that the kernel hands over; smaller where that would be more than a burst
HOST_QUEUE = 8 << 20
CLONE_NEWNET = 0x40000000


def refusal() -> str | None:
    """Why no network can be built here, if so."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, procps)"
    probe = f"{PREFIX}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"cannot make a network namespace: {made.stderr.strip()}"
    _run(f"ip netns del {probe}")
    return None


@contextmanager
def network(
    rates_bps: Sequence[float], buffer_bytes: int, window_bytes: int = 1 << 20, burst_s: float = BURST_S
) -> Iterator[list[str]]:
    """One host for each rate, gone after the block however it ends; gives the namespaces' names.

    buffer_bytes: of each switch port. window_bytes: the largest send buffer of a connection. burst_s: what a port lets pass at
    once after a rest, at its rate, but no more than one SEGMENT and its headers.
    """
    hosts = [f"{PREFIX}h{i}" for i in range(len(rates_bps))]
    switch = f"{PREFIX}sw"
    try:
        _build(hosts, switch, rates_bps, buffer_bytes, window_bytes, burst_s)
        yield hosts
    finally:
        for name in (*hosts, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter(host: str) -> None:
    """Move this thread, and threads that it starts, into a namespace."""
    with open(f"/run/netns/{host}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {host}")


def retransmitted() -> int:
    """TCP segments that this namespace has sent again."""
    with open("/proc/self/net/snmp") as file:
        names, values = [line.split() for line in file if line.startswith("Tcp:")]
    return int(values[names.index("RetransSegs")])


def _build(
    hosts: list[str], switch: str, rates_bps: Sequence[float], buffer_bytes: int, window_bytes: int, burst_s: float
) -> None:
    _run(f"ip netns add {switch}")
    _run(f"ip -n {switch} link set lo up")
    _sysctl(switch, "net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0")
    _sysctl(switch, "net.ipv4.conf.all.send_redirects=0 net.ipv4.conf.default.send_redirects=0")
    for i, (host, rate) in enumerate(zip(hosts, rates_bps, strict=True)):
        address = f"{SUBNET}.{i + 1}"
        _run(f"ip netns add {host}")
        _sysctl(host, "net.ipv4.tcp_congestion_control=reno net.ipv4.tcp_no_metrics_save=1")
        _sysctl(host, "net.ipv4.tcp_slow_start_after_idle=0")
        _run(f"ip netns exec {host} sysctl -qw", f"net.ipv4.tcp_wmem=4096 {window_bytes} {window_bytes}")
        _run(f"ip netns exec {host} sysctl -qw", "net.ipv4.tcp_rmem=4096 4194304 4194304")
        _run(f"ip -n {host} link add eth0 type veth peer name p{i} netns {switch}")
        _run(f"ip -n {host} link set lo up")
        _run(f"ip -n {host} addr add {address}/24 dev eth0")
        burst = min(max(int(rate / 8 * burst_s), 4 * 1514), SEGMENT * 5 // 4)
        for ns, device, queue in ((host, "eth0", HOST_QUEUE), (switch, f"p{i}", buffer_bytes)):
            _run(f"ip -n {ns} link set {device} gso_max_size {burst * 4 // 5} up")  # or the bucket cuts it
            _run(f"ip netns exec {ns} tc qdisc replace dev {device} root tbf rate {rate:.0f}bit burst {burst} limit {queue}")
        _run(f"ip -n {switch} route add {address}/32 dev p{i}")
    for i, host in enumerate(hosts):
        _run(f"ip -n {switch} neigh replace {SUBNET}.{i + 1} lladdr {_mac(host, 'eth0')} dev p{i} nud permanent")
        router = _mac(switch, f"p{i}")
        for j in range(len(hosts)):
            if j != i:
                _run(f"ip -n {host} neigh replace {SUBNET}.{j + 1} lladdr {router} dev eth0 nud permanent")


def _mac(ns: str, device: str) -> str:
    return _run(f"ip netns exec {ns} cat /sys/class/net/{device}/address").strip()


def _sysctl(ns: str, settings: str) -> None:
    _run(f"ip netns exec {ns} sysctl -qw {settings}")


def _run(command: str, *more: str) -> str:
    done = subprocess.run([*command.split(), *more], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return done.stdout
