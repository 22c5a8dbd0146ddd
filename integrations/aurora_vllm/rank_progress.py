"""Progress of each rank, written to a memory-mapped file that the other ranks of its host read.

Neither side takes locks, sends messages or makes system calls. When a collective fails, the files tell which rank is lost."""

import errno
import ipaddress
import mmap
import os
import socket
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from aurora.errors import RankFailed, first_line
from aurora.runtime.distributed.close_connections import open_sockets
from aurora_vllm.settings import SHARED_FOLDER
from aurora_vllm.stuck_rank import BALANCERS, COMPUTE, EXCHANGES, GONE, IDLE, PHASES, RUNS, STOPPED, Pass, RankState

FOLDER = "AURORA_STATUS_FOLDER"  # variable that names the folder of one server's files, for its processes
WORKER, ENGINE, SERVES, LEFT, BEAT, DOING, SINCE, LAYER, PASSES = range(9)  # words of a file
BALANCER, BALANCER_SINCE, BALANCER_PASSES, BALANCER_LAYERS = range(9, 13)
OWN, SILENT, RING = 16, 20, 32  # words at which lists begin
ADDRESSES, MOST_PEERS, RING_PASSES, PASS_WORDS = 4, 12, 128, 5
WORDS = RING + RING_PASSES * PASS_WORDS
FILE = "rank-"
NO_LAYER = -1
RESENT = 2  # times that bytes were sent again before they count as unacknowledged
ANSWER_S = 0.5  # within which a host answers
CLOSED_PORT = 9  # nobody listens there, so that a host refuses at once
EXIT_S = 2.0  # within which a dying process is seen to have exited
_COMPUTE, _IDLE = PHASES.index(COMPUTE), PHASES.index(IDLE)


class RankProgress:
    """Writes this rank's progress to its file.

    Args:
        path: the file to write to; None: the progress is not published.

    Attributes:
        exchange: one context manager per kind in EXCHANGES, to be entered while this rank waits for the others.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._words = _mapped(path, create=True) if path is not None else memoryview(bytearray(8 * WORDS)).cast("q")
        self._exchanges = self._compute_ns = self._began_ns = self._tokens = 0
        self._phase, self._since_ns = _IDLE, time.monotonic_ns()
        self.exchange = {phase: Waiting(self, phase) for phase in EXCHANGES}
        self._asked, self._unanswering = -1, set[str]()  # hosts are asked for an answer once in an exchange
        self._words[LAYER] = NO_LAYER
        self._words[WORKER], self._words[ENGINE] = os.getpid(), os.getppid()
        self.beat()

    def begin_pass(self, tokens: int) -> None:
        """Records the start of a forward pass with `tokens` tokens of this rank."""
        self._tokens, self._compute_ns, self._phase = tokens, 0, _IDLE
        self._set(_COMPUTE)
        self._began_ns = self._since_ns

    def end_pass(self) -> None:
        """Records the end of the forward pass, and its times."""
        self._set(_IDLE)
        words, number = self._words, self._words[PASSES]
        at = RING + number % RING_PASSES * PASS_WORDS
        words[at + 1], words[at + 2] = max(self._tokens, 1).bit_length(), self._compute_ns
        words[at + 3], words[at + 4] = self._since_ns - self._began_ns, self._since_ns
        words[at] = self._exchanges
        words[PASSES], words[LAYER] = number + 1, NO_LAYER

    def layer(self, number: int) -> None:
        """Records the start of the MoE layer with index `number`."""
        self._words[LAYER] = number

    def arrive(self, phase: int) -> None:
        """Records that this rank has arrived at an exchange and waits for all others; `phase` is an index in PHASES."""
        now_ns, words = time.monotonic_ns(), self._words  # as `_set`, but twice in each layer: calls take time
        if self._phase == _COMPUTE:
            self._compute_ns += now_ns - self._since_ns
        self._exchanges += 1
        self._phase, self._since_ns = phase, now_ns
        words[SINCE] = now_ns
        words[DOING] = self._exchanges << 8 | phase

    def leave(self) -> None:
        """Records that the exchange has ended and this rank computes again."""
        now_ns, words = time.monotonic_ns(), self._words
        self._phase, self._since_ns = _COMPUTE, now_ns
        words[SINCE] = now_ns
        words[DOING] = self._exchanges << 8 | _COMPUTE

    def idle(self) -> None:
        """Records that this rank is idle."""
        self._set(_IDLE)

    def count_anew(self) -> None:
        """Resets the count of exchanges, so that ranks agree after an exchange that failed only on some of them."""
        self._exchanges = 0
        self._set(_IDLE)

    def _set(self, phase: int) -> None:
        now_ns = time.monotonic_ns()
        if self._phase == _COMPUTE:
            self._compute_ns += now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns
        self._words[SINCE] = now_ns
        self._words[DOING] = self._exchanges << 8 | phase

    # What the watchdog's thread writes

    def serve(self) -> None:
        """Records that warm-up is over."""
        self._words[SERVES] = 1

    def end(self) -> None:
        """Records that this rank ends as intended. If its engine process is gone, records nothing: the rank counts as lost."""
        self._words[LEFT] = os.getppid() == self._words[ENGINE]

    def beat(self) -> None:
        """Records a heartbeat."""
        self._words[BEAT] = time.monotonic_ns()

    def balance(self, balancer: str, layers: int) -> None:
        """Records the state of EPLB's background thread (one of BALANCERS), and the number of layers whose moves it began."""
        words, now = self._words, (BALANCERS.index(balancer), layers)
        if (words[BALANCER], words[BALANCER_LAYERS]) != now:
            words[BALANCER_SINCE], words[BALANCER_PASSES] = time.monotonic_ns(), words[PASSES]
        words[BALANCER], words[BALANCER_LAYERS] = now

    @property
    def waited_s(self) -> float:
        """Seconds since this rank arrived at its present exchange; 0 outside of exchanges."""
        phase, since_ns = self._phase, self._since_ns
        return 0.0 if phase in (_COMPUTE, _IDLE) else (time.monotonic_ns() - since_ns) / 1e9

    def publish_links(self) -> None:
        """Publishes the addresses of this rank's TCP connections, and of peers that do not acknowledge or answer."""
        local, peers, silent = connections()
        if self._asked != self._exchanges:
            self._asked, self._unanswering = self._exchanges, unanswering(peers)
        for start, length, addresses in ((OWN, ADDRESSES, local), (SILENT, MOST_PEERS, silent | self._unanswering)):
            digests = sorted(zlib.crc32(address.encode()) + 1 for address in addresses)
            for number, digest in enumerate([*digests, *[0] * length][:length]):
                self._words[start + number] = digest


class Waiting:
    """Context manager around the exchanges of one kind. After an error, the rank still counts as waiting in the exchange."""

    def __init__(self, progress: RankProgress, phase: str) -> None:
        self._progress, self._phase = progress, PHASES.index(phase)

    def __enter__(self) -> None:
        self._progress.arrive(self._phase)

    def __exit__(self, kind: object, *_error: object) -> None:
        if kind is None:
            self._progress.leave()


class RankFiles:
    """Reads the progress of the ranks of a server that run on this host.

    Args:
        folder: folder of the ranks' files.
        ranks: the ranks to read; None: the ranks that have a file now.
    """

    def __init__(self, folder: Path, ranks: list[int] | None = None) -> None:
        there = (int(path.name.removeprefix(FILE)) for path in folder.glob(f"{FILE}*"))
        self._folder, self.ranks = folder, sorted(there) if ranks is None else ranks
        self._words: dict[int, memoryview] = {}

    def keep(self, ranks: list[int]) -> None:
        """Reads `ranks` from now on, and deletes the files of the ranks that are no longer among them."""
        for lost in set(self.ranks) - set(ranks):
            file_of(self._folder, lost).unlink(missing_ok=True)
            self._words.pop(lost, None)  # if it comes back, it has another file
        self.ranks = ranks

    def serving(self) -> bool:
        """Returns True if all ranks are past warm-up, and none has ended as intended."""
        for rank in self.ranks:
            if rank not in self._words:
                with suppress(OSError, ValueError):
                    self._words[rank] = _mapped(file_of(self._folder, rank))
        words_R = [self._words.get(rank) for rank in self.ranks]
        return all(words is not None and words[SERVES] and not words[LEFT] for words in words_R)

    def states(self, window_s: float) -> dict[int, RankState]:
        """Returns the state of each rank, including its forward passes of the last `window_s` seconds."""
        words_R = {rank: self._words[rank] for rank in self.ranks}
        now_ns, engines = time.monotonic_ns(), {words[ENGINE] for words in words_R.values()}
        owners = {rank: set(words[OWN : OWN + ADDRESSES]) - {0} for rank, words in words_R.items()}
        return {rank: _state(words, now_ns, window_s, len(engines) > 1, rank, owners) for rank, words in words_R.items()}

    def silent_s(self, rank: int) -> float:
        """Returns the seconds since a rank's last heartbeat; infinity if its process does not run."""
        words = self._words[rank]
        runs = process_state(words[WORKER]) == RUNS
        return (time.monotonic_ns() - words[BEAT]) / 1e9 if runs else float("inf")

    def lost(self) -> list[int]:
        """Returns the ranks whose worker or engine process has ended, except the rank of this process."""
        self.serving()
        words_R = {rank: self._words[rank] for rank in self.ranks if rank in self._words}
        pids = {rank: {words[WORKER], words[ENGINE]} for rank, words in words_R.items() if not words[LEFT]}
        return [r for r, both in pids.items() if os.getpid() not in both and GONE in map(process_state, both)]


def status_files() -> RankFiles | None:
    """Returns the files of the ranks of this process's server; None if there are none."""
    files = RankFiles(Path(folder)) if (folder := os.environ.get(SHARED_FOLDER, os.environ.get(FOLDER))) else None
    return files if files is not None and files.ranks else None


@contextmanager
def naming_lost_ranks(files: RankFiles | None) -> Iterator[None]:
    """Context manager that turns an error into a RankFailed which names the lost ranks.

    A collective that fails names an address and no rank. Errors pass unchanged if no rank is known to be lost, or `files` is
    None.
    """
    try:
        yield
    except (RuntimeError, RankFailed) as error:
        until = time.monotonic() + EXIT_S
        while files is not None and not (lost := files.lost()) and time.monotonic() < until:
            time.sleep(0.05)
        if files is None or not lost:
            raise
        gone = ", ".join(map(str, lost))
        raise RankFailed(f"expert-parallel rank {gone} is gone: {first_line(error)}") from error


def connections() -> tuple[set[str], set[str], set[str]]:
    """Returns IP addresses of this process's TCP connections: (local ones, peers, peers that acknowledge nothing)."""
    addresses, peers, silent = set[str](), set[str](), set[str]()
    inodes = {str(inode) for inode in open_sockets()}
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/thread-self/net/{name}") as file:
            for line in file.readlines()[1:]:
                _, local, remote, state, _, timer, resent, _, _, inode, *_ = line.split()
                if inode in inodes and state == "01":
                    addresses.add(_address(local))
                    peers.add(_address(remote))
                    if timer.startswith("01:") and int(resent, 16) >= RESENT:
                        silent.add(_address(remote))
    return addresses, peers - addresses, silent


def unanswering(addresses: set[str]) -> set[str]:
    """Returns the addresses that neither accept nor refuse a test connection within ANSWER_S.

    If no address answers at all, returns an empty set, because a firewall may drop all test connections.
    """
    with ThreadPoolExecutor(max(len(addresses), 1)) as pool:
        silent = {address for address, answers in zip(addresses, pool.map(_answers, addresses), strict=True) if not answers}
    return silent if silent < addresses else set()


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, CLOSED_PORT), ANSWER_S).close()
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return True


def _address(text: str) -> str:
    """The address in the kernel's "address:port"; of an IPv4 address in IPv6 the former."""
    words = bytes.fromhex(text.partition(":")[0])
    address = ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def process_state(pid: int) -> str:
    """Returns the state of a process of this host: RUNS, STOPPED or GONE. A zombie is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return GONE
    return GONE if letter in "ZX" else STOPPED if letter in "Tt" else RUNS


def file_of(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's progress file."""
    return folder / f"{FILE}{rank}"


def _mapped(path: Path, create: bool = False) -> memoryview:
    """The words of a rank's file."""
    if create:
        new = path.with_name(f".{path.name}-{os.getpid()}")
        new.write_bytes(bytes(8 * WORDS))
        new.replace(path)
    with path.open("r+b" if create else "rb") as file:
        access = mmap.ACCESS_WRITE if create else mmap.ACCESS_READ
        return memoryview(mmap.mmap(file.fileno(), 8 * WORDS, access=access)).cast("q")


def _state(
    words: memoryview, now_ns: int, window_s: float, own_engine: bool, rank: int, owners: dict[int, set[int]]
) -> RankState:  # fmt: skip
    """A rank's state."""
    doing = words[DOING] - 1
    while doing != words[DOING]:  # it goes on meanwhile
        doing, since_ns = words[DOING], words[SINCE]
    processes = {process_state(pid) for pid in (words[WORKER], *([words[ENGINE]] if own_engine else ()))}
    ring, since_pass_ns = words[RING:].tolist(), now_ns - window_s * 1e9
    passes = {
        ring[at]: Pass(ring[at + 1], ring[at + 2] / 1e9, ring[at + 3] / 1e9)
        for at in range(0, len(ring), PASS_WORDS)
        if ring[at + 4] > max(since_pass_ns, 0)
    }
    silent = set(words[SILENT : SILENT + MOST_PEERS]) - {0}
    mine = owners[rank]
    return RankState(
        process=next((process for process in (GONE, STOPPED) if process in processes), RUNS),
        silent_s=(now_ns - words[BEAT]) / 1e9,
        phase=PHASES[doing & 255],
        since_s=(now_ns - since_ns) / 1e9,
        exchanges=doing >> 8,
        layer=None if words[LAYER] == NO_LAYER else words[LAYER],
        passes=passes,
        unacknowledged=frozenset(peer for peer, addresses in owners.items() if addresses - mine & silent),
        balancer=BALANCERS[words[BALANCER]],
        balancer_s=(now_ns - words[BALANCER_SINCE]) / 1e9,
        balancer_passes=words[PASSES] - words[BALANCER_PASSES],
        balancer_layers=words[BALANCER_LAYERS],
    )
