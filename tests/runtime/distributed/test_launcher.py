"""Real processes: results, failures, and nothing left behind."""

import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from aurora.errors import BadInput, RankFailed
from aurora.runtime.distributed import launcher
from aurora.runtime.distributed.close_connections import connected, open_sockets
from aurora.runtime.distributed.connections import URGENT_TOS
from aurora.runtime.distributed.launcher import launch, launch_threads, serve_store, start_fork_server
from aurora.runtime.transports.process_groups import default_process_group, new_process_group, rank_info_from_environment


def identity(rank_info, *args):
    return rank_info.rank, rank_info.ranks, args


def meet(rank_info):
    with default_process_group(rank_info):
        return rank_info.rank


def stand(rank_info):
    """When this rank's group stood, and when it got into the block; the second rank's group is late."""
    import torch.distributed as dist

    stood_s, init = [], dist.init_process_group

    def late(*arguments, **named):
        init(*arguments, **named)
        time.sleep(0.3 * rank_info.rank)
        stood_s.append(time.monotonic())

    dist.init_process_group = late
    with default_process_group(rank_info):
        return stood_s[0], time.monotonic()


def marks(rank_info):
    """The types of service of the connections of a group that is urgent, and of one that is not."""
    found = []
    with default_process_group(rank_info):
        for urgent in (True, False):
            before = open_sockets()
            group = new_process_group("gloo", 60.0, urgent)
            made = connected(number for inode, number in open_sockets().items() if inode not in before)
            found.append({end.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for end in made})
            group.barrier().wait()
    return found


def complain(rank_info):
    if rank_info.rank == 1:
        raise BadInput("this file is wrong")
    time.sleep(60)


def stumble(rank_info):
    if rank_info.rank == 2:
        raise ZeroDivisionError("a bug")
    time.sleep(60)


def die(rank_info, pids):
    (pids / str(rank_info.rank)).write_text(str(os.getpid()))
    if rank_info.rank == 1:
        while len(list(pids.iterdir())) < rank_info.ranks:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_and_be_missed(rank_info):
    """The others notice first: their errors must not hide whose death it was."""
    import torch.distributed as dist

    with default_process_group(rank_info):
        dist.barrier()
        if rank_info.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def hang(rank_info):
    import torch
    import torch.distributed as dist

    from aurora.runtime.transports.gloo import GlooTransport

    with default_process_group(rank_info):
        transport = GlooTransport(new_process_group("gloo", 2.0))
        dist.barrier()
        if rank_info.rank == 1:
            time.sleep(60)
        transport.gather(torch.zeros(1))


def take_long(rank_info):
    time.sleep(3)
    return rank_info.rank


def count_threads(_rank_info):
    import torch

    return torch.get_num_threads()


def test_ranks_share_the_cores_and_take_no_more_threads_than_the_environment_allows():
    assert launch(count_threads, 1) == [int(os.environ["OMP_NUM_THREADS"])]


def test_nobody_leaves_a_meeting_that_others_still_come_to():
    stood_s, entered_s = zip(*launch(stand, 2), strict=True)
    assert min(entered_s) >= max(stood_s)


def test_a_users_error_is_raised_as_it_is():
    with pytest.raises(BadInput, match="this file is wrong"):
        launch(complain, 2)


def test_a_bug_names_its_rank_and_place():
    with pytest.raises(RankFailed, match=r"rank 2: ZeroDivisionError at test_launcher\.py:\d+: a bug"):
        launch(stumble, 3)


def test_a_killed_rank_is_named_and_the_others_are_gone(tmp_path):
    with pytest.raises(RankFailed, match=r"rank 1 of 3 died \(killed by signal 9\)"):
        launch(die, 3, tmp_path)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_death_is_blamed_on_the_dead():
    with pytest.raises(RankFailed, match=r"rank 0 of 2 died \(killed by signal 9\)"):
        launch(die_and_be_missed, 2)


def test_a_peer_that_hangs_is_not_waited_for_forever():
    with pytest.raises(RankFailed, match=r"rank 0 lost rank 1: .*[Tt]imed out"):
        launch(hang, 2)


def test_working_for_longer_than_the_timeout_is_no_failure():
    assert launch(take_long, 2, timeout_s=1.0) == [0, 1]


def test_an_address_of_another_machine_is_a_sentence():
    with pytest.raises(BadInput, match=r"192\.0\.2\.1: cannot be listened on: Cannot assign requested address"):
        serve_store("192.0.2.1")


def test_torchruns_variables_make_a_rank_info(monkeypatch):
    assert rank_info_from_environment(1.0) is None
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    rank_info = rank_info_from_environment(1.0)
    assert (rank_info.rank, rank_info.ranks, rank_info.host, rank_info.port) == (1, 4, "10.0.0.1", 29500)
    assert not rank_info.launched
    assert launch(meet, 2) == [0, 1]  # ranks that we launch meet at our store whatever the environment says
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(BadInput, match="expected 0 <= RANK < WORLD_SIZE, found 4 and 4"):
        rank_info_from_environment(1.0)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(BadInput, match="must be whole numbers"):
        rank_info_from_environment(1.0)


def test_packets_of_an_urgent_group_are_marked():
    assert launch(marks, 2, timeout_s=60.0) == [[{URGENT_TOS}, {0}]] * 2


def test_an_error_of_a_rank_that_is_a_thread_comes_when_the_others_have_ended():
    ended, failed = [], threading.Event()

    def load(rank_info):
        if rank_info.rank == 0:
            failed.set()
            raise BadInput("this file is wrong")
        failed.wait()
        time.sleep(0.1)
        ended.append(rank_info.rank)

    with pytest.raises(BadInput, match="this file is wrong"):
        launch_threads(load, 3)
    assert sorted(ended) == [1, 2]


APART = """
from aurora.runtime.distributed.launcher import start_fork_server
if __name__ == "__main__":
    child = start_fork_server([]).Process(target=print, args=("served",))
    child.start()
    child.join()
"""


def test_threads_that_start_processes_at_once_leave_all_as_it_was(monkeypatch):
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", lambda: time.sleep(0.01))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    main = sys.modules["__main__"]

    def start(_):
        start_fork_server()
        with launcher._without_main_module():
            time.sleep(0.01)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(start, range(8)))
    assert "PYTHONSAFEPATH" not in os.environ
    assert sys.modules["__main__"] is main


def test_no_module_comes_from_the_working_folder(tmp_path):
    (tmp_path / "script.py").write_text(APART)
    (here := tmp_path / "here").mkdir()
    for name in ("random", "platform", "queue", "selectors"):
        (here / f"{name}.py").write_text("raise RuntimeError")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, cwd=here, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("served\n", "")


LED = """
import sys, time
from aurora.runtime.distributed.launcher import launch
from tests.runtime.distributed.test_launcher import say_and_sleep
launch(say_and_sleep, 2, sys.argv[1])
"""


def say_and_sleep(rank_info, folder):
    (Path(folder) / f"rank-{rank_info.rank}").write_text(str(os.getpid()))
    time.sleep(300)


def alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def short_folder():
    """A folder in whose path there is room for a socket's name, at most 107 bytes long."""
    with tempfile.TemporaryDirectory(prefix="aurora-") as folder:
        yield Path(folder)


@pytest.mark.full
def test_a_killed_leader_leaves_no_rank_though_one_is_stopped_no_fork_server_and_no_folder(tmp_path, short_folder):
    environment = os.environ | {"TMPDIR": str(short_folder)}
    root = Path(__file__).parents[3]
    leader = subprocess.Popen([sys.executable, "-c", LED, tmp_path], env=environment, cwd=root)
    family = []
    try:
        while len(found := [path.read_text() for path in tmp_path.glob("rank-*")]) < 2 or not all(found):
            assert leader.poll() is None
            time.sleep(0.05)
        family = psutil.Process(leader.pid).children(recursive=True)
        assert {int(pid) for pid in found} <= {process.pid for process in family}
        psutil.Process(int(found[0])).suspend()
        leader.kill()
        leader.wait()
        late_s = time.monotonic() + 30
        while (left := [process for process in family if alive(process)]) and time.monotonic() < late_s:
            time.sleep(0.05)
        assert not left
        assert not list(short_folder.glob("pymp-*"))
    finally:
        for process in filter(alive, [psutil.Process(leader.pid)] if leader.poll() is None else family):
            process.kill()
