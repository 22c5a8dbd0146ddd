"""Port arbiter of models in separate processes: real processes, some of them killed."""

import fcntl
import json
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest

from aurora.algorithms.arbitration import PortSlices
from aurora.errors import BadInput, RankFailed
from aurora.runtime import process_port_arbiter
from aurora.runtime.arbiter_process import LOCK, SOCKET, Arbiter, Client
from aurora.runtime.process_port_arbiter import VERSION, ProcessPortArbiter, colocation_folder
from aurora.types import RunOptions, SlicePolicy

CONTEXT = multiprocessing.get_context("forkserver")  # a fork of this process, with all that tests import, may crash
TIMEOUT_S = 120.0  # longer than any process waits for a core of a busy machine


@contextmanager
def processes(*jobs):
    """Each (function, *args) in a process of its own with a queue to tell the test something; all are gone afterwards."""
    told = CONTEXT.Queue()
    started = [CONTEXT.Process(target=job, args=(told, *args)) for job, *args in jobs]
    try:
        for process in started:
            process.start()
        yield started, told
    finally:
        for process in started:
            process.kill()
            process.join()


@pytest.fixture
def join(tmp_path):
    """A port arbiter of this process in the test's folder; `settle` returns when the arbiter process has read all packets."""
    made = []

    def arbiter(gpu=0, slot=None, turn_s=TIMEOUT_S, **policy):
        made.append(ProcessPortArbiter(tmp_path, gpu, slot, turn_s=turn_s, policy=SlicePolicy(**policy)))
        made[-1].settle = settle
        return made[-1]

    def settle():
        probe = ProcessPortArbiter(tmp_path, 63)
        for _ in range(2):  # what was sent before the first answer is read before the second
            probe.start_compute()
            probe.stop_compute()
        probe.leave()

    yield arbiter
    for each in made:
        each.leave()


def hear(told, count):
    return [told.get(timeout=TIMEOUT_S) for _ in range(count)]


def enter(told, folder, what, gpu=0, slot=None):
    arbiter = ProcessPortArbiter(folder, gpu, slot, turn_s=TIMEOUT_S)
    if what == "GPU":
        arbiter.start_compute()
    else:
        inside = arbiter.exchange()
        inside.__enter__()
    told.put("inside")
    time.sleep(2 * TIMEOUT_S)


@pytest.mark.parametrize("what", ["GPU", "port"])
def test_what_a_killed_process_held_is_free(tmp_path, join, what):
    with processes((enter, tmp_path, what)) as ((victim,), told):
        assert hear(told, 1) == ["inside"]
        arbiter = join()
        os.kill(victim.pid, signal.SIGKILL)
        for _ in range(3):
            arbiter.start_compute()
            arbiter.stop_compute()
            with arbiter.exchange():
                pass


def test_what_a_stopped_process_has_is_passed_on_and_that_is_said_once(tmp_path, join, caplog):
    arbiters = [join(turn_s=0.2), join(turn_s=0.2)]
    with processes((enter, tmp_path, "GPU"), (enter, tmp_path, "port")) as (stopped, told):
        hear(told, 2)
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
        for arbiter in arbiters * 2:
            arbiter.start_compute()
            arbiter.stop_compute()
            with arbiter.exchange():
                pass
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2
        for process, what, text in zip(stopped, ("GPU 0", "the port"), said, strict=True):
            assert text.startswith(f"process {process.pid} has had {what} for more than 0.2 s: the others go on")


def test_who_comes_back_does_not_end_the_turn_that_came_after_its_own(join):
    slow, other = join(), join(turn_s=0.2)
    slow.start_compute()
    other.start_compute()
    slow.stop_compute()
    seen = []

    def compute():
        slow.start_compute()
        seen.append("slow")

    waiting = threading.Thread(target=compute)
    waiting.start()
    slow.settle()
    seen.append("other")
    other.stop_compute()
    waiting.join(TIMEOUT_S)
    assert seen == ["other", "slow"]


def work(told, folder, rounds, pause_s, here):
    arbiter = ProcessPortArbiter(folder, 0, turn_s=TIMEOUT_S)
    here.wait(TIMEOUT_S)
    for _ in range(rounds):
        arbiter.start_compute()
        began = time.monotonic()
        time.sleep(0.002)
        told.put((os.getpid(), began, time.monotonic()))
        arbiter.stop_compute()
        time.sleep(pause_s)
    arbiter.leave()


def test_three_processes_compute_one_at_a_time_and_in_turn(tmp_path):
    """Whoever always wants the GPU gets every third turn, while all three do."""
    rounds = 30
    with processes(*[(work, tmp_path, rounds, 0.0, CONTEXT.Barrier(3, timeout=60))] * 3) as (_, told):
        spans = sorted(hear(told, 3 * rounds), key=lambda span: span[1])
    assert all(before[2] <= after[1] for before, after in pairwise(spans))
    first = max(next(i for i, span in enumerate(spans) if span[0] == pid) for pid in {span[0] for span in spans})
    last = min(max(i for i, span in enumerate(spans) if span[0] == pid) for pid in {span[0] for span in spans})
    together = [span[0] for span in spans[first : last + 1]]
    counts = [together.count(pid) for pid in set(together)]
    assert max(counts) - min(counts) <= 2


def test_a_killed_rank_lets_the_other_model_go_on_everywhere(tmp_path, join):
    """Model a's rank 1 dies inside an exchange, and rank 0 gives up: model b's exchanges need both ports."""
    a = join()
    with processes((enter, tmp_path, "port", 1, a.slot)) as ((victim,), told):
        hear(told, 1)
        inside = a.exchange()
        inside.__enter__()
        b = join()
        other = join(1, slot=b.slot)
        os.kill(victim.pid, signal.SIGKILL)
        a.abort(RuntimeError("lost rank 1"))
        for arbiter in (other, b):
            with arbiter.exchange():
                pass
        with pytest.raises(RankFailed, match="the other model on this rank failed: lost rank 1"):
            a.start_compute()


def test_a_killed_arbiter_ends_every_wait_with_a_sentence_and_the_next_one_serves_again(tmp_path, join):
    holder, waiter = join(), join()
    holder.start_compute()
    failed = []

    def wait():
        try:
            waiter.start_compute()
        except RankFailed as error:
            failed.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiter.settle()
    with processes_of(tmp_path) as (arbiter,):
        os.kill(arbiter, signal.SIGKILL)
    waiting.join(TIMEOUT_S)
    assert failed == ["the arbiter of the GPUs that this model shares has ended: start their models again"]
    with suppress(RankFailed):  # its own connection may end a little later
        holder.stop_compute()
    with pytest.raises(RankFailed, match="has ended"):
        holder.start_compute()
    again = join()
    again.start_compute()
    again.stop_compute()


@contextmanager
def processes_of(folder):
    """The arbiter processes of a folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"aurora.runtime.arbiter_process" in words and str(folder).encode() in words:
            found.append(int(pid))
    yield found


def stay(told, folder, here):
    here.wait(TIMEOUT_S)
    arbiter = ProcessPortArbiter(folder, 0)
    told.put(arbiter.slot)
    here.wait(TIMEOUT_S)
    arbiter.start_compute()
    arbiter.stop_compute()
    told.put(arbiter.exclusive)
    here.wait(TIMEOUT_S)


def test_processes_that_start_at_once_share_one_arbiter_which_ends_after_the_last(tmp_path):
    count = 6
    with processes(*[(stay, tmp_path, CONTEXT.Barrier(count, timeout=TIMEOUT_S))] * count) as (started, told):
        heard = hear(told, 2 * count)  # a process's second word may come before another's first
        assert sorted(each for each in heard if each is not False) == list(range(count))
        assert heard.count(False) == count + 1  # with slot 0, which equals it
        for process in started:
            process.join(TIMEOUT_S)
    lock = os.open(tmp_path / LOCK, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # which an arbiter keeps while it lives
    os.close(lock)
    assert not (tmp_path / SOCKET).exists()


@pytest.mark.parametrize(
    "packet",
    [
        pickle.dumps(os.getpid), b"[" * 4000, b"{}", b'"join"', b"[[]]", b'["leave"]', b'["exchange"]', b'["join", 0]',
        b'["join", [], null, {}, 1, ""]', b"\xff" * 9000, b"null", b'["computed"]',
    ],
)  # fmt: skip
def test_whoever_sends_anything_else_is_cut_off_and_changes_nothing(packet, tmp_path, join):
    arbiter = join()
    arbiter.start_compute()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(TIMEOUT_S)
        peer.connect(str(tmp_path / SOCKET))
        peer.send(packet)
        assert peer.recv(100) == b""
    arbiter.stop_compute()
    with arbiter.exchange():
        pass
    assert arbiter.exclusive


def test_an_exchange_that_nobody_granted_cannot_be_ended(tmp_path, join):
    first, second = join(), join()
    with first.exchange():
        second._tell("exchanged", False)
        with pytest.raises(RankFailed):
            second.start_compute()
    with first.exchange():
        pass


def test_an_arbiter_of_another_user_is_not_trusted(join, tmp_path, monkeypatch):
    join()
    monkeypatch.setattr(process_port_arbiter, "peer_user", lambda _: os.getuid() + 1)
    with pytest.raises(BadInput, match=f"expected an arbiter of this user in .*, found one of {os.getuid() + 1}"):
        ProcessPortArbiter(tmp_path, 0)


class Wire:
    """The socket of a client that is told what the arbiter grants."""

    def __init__(self):
        self.granted = 0

    def send(self, packet):
        self.granted += json.loads(packet)[0] == "granted"


@pytest.mark.parametrize("models", [2, 3, 5])
def test_models_that_always_wait_take_ports_and_gpus_in_the_sequence_of_threads(models):
    slices, arbiter, threads = PortSlices([SlicePolicy()] * models, True), Arbiter(), []
    for model in range(models):
        slices.ask(model)
    for _ in range(4 * models):
        (now,) = filter(slices.may_begin, range(models))
        threads.append(now)
        slices.begin(now)
        slices.end(now)
        slices.ask(now)
    clients = [Client(Wire()) for _ in range(models)]
    for client in clients:
        arbiter.receive(client, b'["join", 0, null, false, "a model"]')
    for begin, end in (("exchange", ["exchanged", False]), ("compute", ["computed"])):
        seen, asks = [], json.dumps([begin, 0] if begin == "compute" else [begin]).encode()
        for client in clients:
            client.connection.granted = 0
            arbiter.receive(client, asks)
        for _ in range(4 * models):
            (now,) = (model for model, client in enumerate(clients) if client.connection.granted)
            seen.append(now)
            clients[now].connection.granted = 0
            arbiter.receive(clients[now], json.dumps(end).encode())
            arbiter.receive(clients[now], asks)
        assert seen == threads


def test_priority_work_runs_before_what_waits_and_at_preemption_points(join):
    first, low, high = (join() for _ in range(3))
    seen = []
    first.start_compute()

    def work(arbiter, name, level):
        arbiter.start_compute(level)
        seen.append(name)
        arbiter.stop_compute()

    assert not first.yield_to_priority(lambda: seen.append("nobody waits"))
    threads = [threading.Thread(target=work, args=each) for each in ((low, "low", 0), (high, "high", 1))]
    for thread in threads:
        thread.start()
    while not first.yield_to_priority(lambda: seen.append("yielded")):
        time.sleep(0.01)
    seen.append("again")
    first.stop_compute()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert seen == ["yielded", "high", "again", "low"]


def test_who_dies_before_the_exchange_that_it_holds_the_port_for_is_not_waited_for(tmp_path, join):
    with processes((hold, tmp_path)) as ((victim,), told):
        hear(told, 1)
        other, killed = join(), []
        waiting = threading.Timer(0.2, lambda: killed.append(os.kill(victim.pid, signal.SIGKILL)))
        waiting.start()
        with other.exchange():
            assert killed == [None]


def hold(told, folder):
    arbiter = ProcessPortArbiter(folder, 0)
    with arbiter.exchange(hold_port=True):
        pass
    told.put("held")
    time.sleep(2 * TIMEOUT_S)


def test_a_folder_that_the_dead_left_is_used_again(tmp_path, join):
    with processes((enter, tmp_path, "GPU"), (enter, tmp_path, "port")) as (dead, told):
        hear(told, 2)
        for process in dead:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        arbiter = join()
        with pytest.raises(BadInput, match=rf"GPU 0 of model {arbiter.slot} is taken by process {os.getpid()}"):
            ProcessPortArbiter(tmp_path, 0, slot=arbiter.slot)
        with pytest.raises(BadInput, match="no model 99"):
            ProcessPortArbiter(tmp_path, 0, slot=99)
        arbiter.start_compute()
        arbiter.stop_compute()


def test_a_path_longer_than_a_sockets_may_be(tmp_path):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    first, second = (ProcessPortArbiter(folder, 0) for _ in range(2))
    first.start_compute()
    waiting = threading.Thread(target=second.start_compute)
    waiting.start()
    first.stop_compute()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    for arbiter in (first, second):
        arbiter.leave()


def test_folders_that_cannot_be_used_and_names(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"file cannot be used: Not a directory"):
        ProcessPortArbiter(tmp_path / "file", 0)
    with pytest.raises(BadInput, match="`colocate`: expected at most 40 letters"):
        RunOptions(interleave="processes", colocate="../x")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which every user can write to."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def mode(path):
    return path.lstat().st_mode & 0o777


def test_the_folder_is_this_users_alone_in_and_out_of_login_sessions(tmp_path, temporary, monkeypatch):
    found = colocation_folder("both")
    assert found == temporary / f"aurora-runtime-{os.getuid()}" / f"both.arbiter-{VERSION}"
    assert mode(found) == mode(found.parent) == 0o700
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert colocation_folder("both") == found


def test_a_folder_of_another_user_or_a_link_is_not_trusted(tmp_path, temporary, monkeypatch):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    ours = temporary / f"aurora-runtime-{os.getuid()}"
    ours.symlink_to(victim)
    with pytest.raises(BadInput, match="expected a folder of this user alone, found a symbolic link"):
        colocation_folder("both")
    assert not list(victim.iterdir())
    ours.unlink()
    ours.mkdir(mode=0o700)
    ours.chmod(0o777)
    with pytest.raises(BadInput, match="found mode 777, not 700"):
        colocation_folder("both")
    ours.chmod(0o700)
    (ours / f"both.arbiter-{VERSION}").symlink_to(victim)
    with pytest.raises(BadInput, match="found a symbolic link"):
        colocation_folder("both")
    uid = os.getuid()
    ours.rename(temporary / f"aurora-runtime-{uid + 1}")
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(BadInput, match=f"found one of user {uid}"):
        colocation_folder("both")


def test_no_link_in_the_folder_is_followed(tmp_path, temporary):
    (tmp_path / "precious").write_text("what the user has")
    folder = colocation_folder("both")
    (folder / LOCK).symlink_to(tmp_path / "precious")
    (folder / SOCKET).symlink_to(tmp_path / "precious")
    with pytest.raises(BadInput, match=r"cannot be used: .*Too many levels of symbolic links"):
        ProcessPortArbiter(folder, 0)
    assert (tmp_path / "precious").read_text() == "what the user has"
