"""A real network on one machine: hosts as network namespaces behind routers, every port and NIC held to its rate both ways.

Token buckets at both ends of each cable (veth); packets are routed, because a bridge keeps them charged to their sender's
socket. Nothing is connected to the outside. Needs root and iproute2.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PREFIX = f"aurora{os.getpid()}"
SUBNET = "10.78.0"
NEXT_HOP = "10.78.1.1"  # an address that no device has: the other end of a cable, whatever the destination
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
    rates_bps: Sequence[float], buffer_bytes: int, window_bytes: int = 1 << 20, burst_s: float = BURST_S, bands: bool = False
) -> Iterator[list[str]]:
    """One host for each rate, all on one switch, gone after the block however it ends; gives the namespaces' names.

    buffer_bytes: of each switch port. window_bytes: the largest send buffer of a connection. burst_s: what a port lets pass at
    once after a rest, at its rate, but no more than one SEGMENT and its headers. bands: whether ports send packets that are
    marked urgent (by their type of service) before others, as switches with traffic classes do.
    """
    with _removed() as namespaces:
        switch = _router(namespaces, "sw")
        hosts = [_host(namespaces, rank, window_bytes) for rank in range(len(rates_bps))]
        for rank, (host, rate_bps) in enumerate(zip(hosts, rates_bps, strict=True)):
            burst = _burst(rate_bps, burst_s)
            cable = _Cable(host, "eth0", switch, f"p{rank}")
            cable.lay(rate_bps, (HOST_QUEUE, buffer_bytes), burst, burst)
            for end in (cable, cable.other_way) if bands else ():
                _run(f"ip -n {end.ns} link set {end.device} txqueuelen 10000")
                _run(f"tc -n {end.ns} qdisc replace dev {end.device} parent 1: handle 10: pfifo_fast")
            cable.plug_in(rank)
            cable.route("default")
        yield hosts


@contextmanager
def servers(
    server_G: Sequence[int],
    inside_bps: float,
    nic_bps: float,
    shared_nic: bool,
    buffer_bytes: int,
    window_bytes: int = 1 << 20,
    burst_s: float = BURST_S,
) -> Iterator[list[str]]:
    """One host for each rank, on servers that NICs connect, gone after the block however it ends; gives the namespaces' names.

    A rank has a port of `inside_bps` to the router of its server. Each rank has a NIC to the core router besides, or each
    server's router has one. Ranks keep one address. Other arguments are those of `network`.
    """
    burst, nic_burst = _burst(inside_bps, burst_s), _burst(nic_bps, burst_s)
    queues, segment_burst = (HOST_QUEUE, buffer_bytes), min(burst, nic_burst)
    with _removed() as namespaces:
        core = _router(namespaces, "core")
        routers = [_router(namespaces, f"s{server}") for server in sorted(set(server_G))]
        hosts = [_host(namespaces, rank, window_bytes) for rank in range(len(server_G))]
        for rank, (host, server) in enumerate(zip(hosts, server_G, strict=True)):
            port = _Cable(host, "eth0", routers[server], f"p{rank}")
            port.lay(inside_bps, queues, burst, segment_burst)
            port.plug_in(rank)
            for peer, its in enumerate(server_G):
                if its == server and peer != rank:
                    port.route(_address(peer))
            if shared_nic:
                port.route("default")
            else:
                nic = _Cable(host, "eth1", core, f"n{rank}")
                nic.lay(nic_bps, queues, nic_burst, segment_burst)
                nic.plug_in(rank)
                nic.route("default")
        for server, router in enumerate(routers) if shared_nic else ():
            nic = _Cable(router, "nic", core, f"n{server}")
            nic.lay(nic_bps, (buffer_bytes, buffer_bytes), nic_burst, segment_burst)
            nic.route("default")
            for rank, its in enumerate(server_G):
                if its == server:
                    nic.other_way.route(_address(rank))
        yield hosts


def rate_commands(ranks: int, rate_bps: float, buffer_bytes: int, burst_s: float = BURST_S) -> list[str]:
    """Commands that hold all ports of `network` to another rate while its hosts go on.

    Connections keep the segments that suit the rate at which they were made: make the network at the lowest of several rates.
    """
    burst, commands = _burst(rate_bps, burst_s), []
    for port in map(_port, range(ranks)):
        commands += [port.bucket(rate_bps, buffer_bytes, burst), port.other_way.bucket(rate_bps, HOST_QUEUE, burst)]
    return commands


def unplug(rank: int) -> None:
    """Take a host of `network` off the switch. Nothing ends its connections, and nothing answers any more."""
    port = _port(rank)
    _run(f"ip -n {port.ns} link set {port.device} down")


def plug_in_again(rank: int) -> None:
    """Undo `unplug`."""
    port = _port(rank)
    _run(f"ip -n {port.ns} link set {port.device} up")
    port.address_other_end()
    port.route(_address(rank))


def _port(rank: int) -> "_Cable":
    """The cable of a host of `network`, seen from the switch."""
    return _Cable(f"{PREFIX}sw", f"p{rank}", f"{PREFIX}h{rank}", "eth0")


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


@contextmanager
def _removed() -> Iterator[list[str]]:
    """Gives an empty list; the namespaces whose names it has at the end of the block are removed."""
    namespaces: list[str] = []
    try:
        yield namespaces
    finally:
        for name in namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _router(namespaces: list[str], name: str) -> str:
    """A new namespace that forwards packets."""
    router = f"{PREFIX}{name}"
    namespaces.append(router)
    _run(f"ip netns add {router}")
    _run(f"ip -n {router} link set lo up")
    unfiltered = [f"conf.{which}.{what}=0" for which in ("all", "default") for what in ("rp_filter", "send_redirects")]
    _sysctl(router, "ip_forward=1", *unfiltered)
    return router


def _host(namespaces: list[str], rank: int, window_bytes: int) -> str:
    """A new namespace for a rank, without devices."""
    host = f"{PREFIX}h{rank}"
    namespaces.append(host)
    _run(f"ip netns add {host}")
    _run(f"ip -n {host} link set lo up")
    _sysctl(host, "tcp_congestion_control=reno", "tcp_no_metrics_save=1", "tcp_slow_start_after_idle=0")
    _sysctl(host, f"tcp_wmem=4096 {window_bytes} {window_bytes}", "tcp_rmem=4096 4194304 4194304")
    return host


@dataclass(frozen=True)
class _Cable:
    """A device of one namespace, and the device at the cable's other end."""

    ns: str
    device: str
    other_ns: str
    other_device: str

    @property
    def other_way(self) -> "_Cable":
        """The cable seen from its other end."""
        return _Cable(self.other_ns, self.other_device, self.ns, self.device)

    def lay(self, rate_bps: float, queues: tuple[int, int], burst: int, segment_burst: int) -> None:
        """Make both devices, each of which sends at the rate from a queue of its own.

        segment_burst: the smallest burst of all buckets that a packet meets; a bucket cuts larger packets, at some cost.
        """
        _run(f"ip -n {self.ns} link add {self.device} type veth peer name {self.other_device} netns {self.other_ns}")
        for end, queue in zip((self, self.other_way), queues, strict=True):
            _run(f"ip -n {end.ns} link set {end.device} gso_max_size {segment_burst * 4 // 5} up")
            _run(end.bucket(rate_bps, queue, burst))
        for end in (self, self.other_way):
            end.address_other_end()

    def bucket(self, rate_bps: float, queue: int, burst: int) -> str:
        """The command that holds what this end sends to a rate."""
        at = f"tc -n {self.ns} qdisc replace dev {self.device} root handle 1:"
        return f"{at} tbf rate {rate_bps:.0f}bit burst {burst} limit {queue}"

    def address_other_end(self) -> None:
        """Let this end send to the device at the other end."""
        mac = _run(f"ip netns exec {self.other_ns} cat /sys/class/net/{self.other_device}/address").strip()
        _run(f"ip -n {self.ns} neigh replace {NEXT_HOP} lladdr {mac} dev {self.device} nud permanent")

    def plug_in(self, rank: int) -> None:
        """Give a rank's end the rank's address, to which the other end then sends."""
        _run(f"ip -n {self.ns} addr add {_address(rank)}/32 dev {self.device}")
        self.other_way.route(_address(rank))

    def route(self, destination: str) -> None:
        """Send packets to a destination from this end."""
        _run(f"ip -n {self.ns} route add {destination} via {NEXT_HOP} dev {self.device} onlink")


def _burst(rate_bps: float, burst_s: float) -> int:
    """Bytes that a bucket of this rate lets pass at once after a rest."""
    return min(max(int(rate_bps / 8 * burst_s), 4 * 1514), SEGMENT * 5 // 4)


def _address(rank: int) -> str:
    return f"{SUBNET}.{rank + 1}"


def _sysctl(ns: str, *settings: str) -> None:
    _run(f"ip netns exec {ns} sysctl -qw", *(f"net.ipv4.{setting}" for setting in settings))


def _run(command: str, *more: str) -> str:
    done = subprocess.run([*command.split(), *more], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return done.stdout
