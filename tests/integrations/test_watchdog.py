"""The watchdog over files of ranks: what ranks do is what others read, and what several looks find is said once."""

import os
import signal
import subprocess
import sys

import pytest
from aurora_vllm import rank_progress, served_metrics, watchdog
from aurora_vllm.plugin_status import PluginStatus
from aurora_vllm.rank_progress import FOLDER, RankFiles, RankProgress, connections, file_of, unanswering
from aurora_vllm.served_metrics import open_status_folder
from aurora_vllm.settings import Settings
from aurora_vllm.stuck_rank import DISPATCH, ENDED, GONE, MOVES, STEP, STOPPED, StuckRank
from aurora_vllm.watchdog import Watchdog
from prometheus_client import CollectorRegistry, generate_latest


def run_pass(progress, tokens=5, layers=2):
    """A forward pass with an exchange before it and one in each layer."""
    progress.begin_pass(tokens)
    with progress.exchange[STEP]:
        pass
    for layer in range(layers):
        progress.layer(layer)
        with progress.exchange[DISPATCH]:
            pass
    progress.end_pass()


def test_ranks_read_what_a_rank_does(tmp_path):
    progress, files = RankProgress(file_of(tmp_path, 0)), RankFiles(tmp_path, [0])
    assert not files.serving(), "it warms up"
    run_pass(progress)
    progress.serve()
    assert files.serving()
    (state,) = files.states(60.0).values()
    assert (state.phase, state.exchanges, state.layer, state.process) == ("idle", 3, None, "runs")
    assert {number: found.size for number, found in state.passes.items()} == {3: 3}
    progress.begin_pass(1)
    progress.layer(7)
    progress.exchange[DISPATCH].__enter__()
    (state,) = files.states(60.0).values()
    assert (state.phase, state.exchanges, state.layer) == ("dispatch", 4, 7)
    with pytest.raises(ValueError, match="bytes"), progress.exchange[DISPATCH]:
        raise ValueError("no bytes")
    (state,) = files.states(60.0).values()
    assert (state.phase, state.exchanges) == ("dispatch", 5), "an exchange that fails does not end"
    progress.balance(MOVES, 2)
    assert next(iter(files.states(60.0).values())).balancer == MOVES
    progress._words[rank_progress.ENGINE] += 1
    progress.end()
    assert files.serving(), "it ends because its engine has"
    progress._words[rank_progress.ENGINE] -= 1
    progress.end()
    assert not files.serving()


def test_many_passes_keep_the_last(tmp_path):
    progress, files = RankProgress(file_of(tmp_path, 0)), RankFiles(tmp_path, [0])
    for tokens in range(300):
        run_pass(progress, tokens)
    files.serving()
    (state,) = files.states(3600.0).values()
    assert sorted(state.passes) == [3 * number for number in range(301 - rank_progress.RING_PASSES, 301)]
    assert not next(iter(files.states(0.0).values())).passes


def test_states_of_processes(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    progress, files = RankProgress(file_of(tmp_path, 1)), RankFiles(tmp_path)
    progress._words[rank_progress.WORKER] = child.pid
    progress.serve()
    assert files.serving()
    assert files.silent_s(1) < 60
    assert files.lost() == []
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert files.states(1.0)[1].process == STOPPED
    child.kill()
    child.communicate()
    assert files.states(1.0)[1].process == GONE
    assert files.silent_s(1) == float("inf")
    assert files.lost() == [1]


@pytest.fixture
def dog(tmp_path, monkeypatch):
    """The watchdog of rank 0 of 2, which looks when it is told to."""
    monkeypatch.setattr(watchdog, "LOOK_S", 3600.0)
    ranks = [RankProgress(file_of(tmp_path, rank)) for rank in range(2)]
    for each in ranks:
        each.serve()
    registry = CollectorRegistry()
    made = Watchdog(0, ranks[0], RankFiles(tmp_path, [0, 1]), True, "m", registry)
    made.registry, made.ranks = registry, ranks
    yield made
    made.end()


def test_two_looks_that_find_the_same_are_said_once(dog, monkeypatch, caplog):
    found = []
    monkeypatch.setattr(watchdog, "stuck_rank", lambda _states, _complete: found[-1])
    slow, late = StuckRank(1, "slow", "is slow: 2.9 times"), StuckRank(1, "late", "is late")
    for verdict in (None, slow, None, slow, slow._replace(reason="is slow: 3.1 times"), slow, late, None, None, None):
        found.append(verdict)
        dog.look()
    assert [record.message for record in caplog.records] == [
        "aurora: rank 1 is slow: 3.1 times", "aurora: rank 1 is slow: 3.1 times: that is over"
    ]  # fmt: skip
    shown = generate_latest(dog.registry).decode()
    assert 'aurora_stuck_rank{cause="slow",ep_rank="1",model_name="m",reason="is slow: 3.1 times"} 0.0' in shown


def test_a_process_that_is_gone_is_said_at_once(dog, monkeypatch):
    monkeypatch.setattr(watchdog, "stuck_rank", lambda _states, _complete: StuckRank(1, "gone", "is gone"))
    dog.look()
    assert dog.told.rank == 1


def test_a_watchdog_that_was_stopped_itself_begins_anew(dog, monkeypatch):
    monkeypatch.setattr(watchdog, "stuck_rank", lambda _states, _complete: StuckRank(1, "slow", "is slow"))
    dog.look()
    dog._looked_s -= 60
    dog.look()
    assert dog.told is None
    dog.look()
    dog.look()
    assert dog.told is not None


def test_without_lost_ranks_the_others_count_anew(dog):
    run_pass(dog.ranks[0])
    dog.keep([0])
    dog.ranks[1].end()
    assert dog.files.serving()
    assert RankFiles(dog.files._folder).ranks == [0], "nobody calls the other one lost from now on"
    assert [(rank, state.exchanges) for rank, state in dog.files.states(1.0).items()] == [(0, 0)]


def test_a_watchdog_that_fails_is_no_stopped_rank(dog, monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "LOOK_S", 0.0)
    monkeypatch.setattr(watchdog, "stuck_rank", lambda *_given: 1 / 0)
    dog._run()
    assert "the watchdog has ended" in caplog.text
    assert not dog.files.serving()


def test_a_process_with_two_servers_has_two_watchdogs(dog, tmp_path, caplog):
    second = Watchdog(0, RankProgress(), RankFiles(tmp_path, []), True, "m", registry=dog.registry)
    second.look()
    second.end()
    assert "no metrics of the watchdog" in caplog.text


def test_nobody_looks_while_a_rank_warms_up_or_ends(dog, monkeypatch):
    monkeypatch.setattr(watchdog, "stuck_rank", lambda *_given: pytest.fail("it looked"))
    dog.ranks[1].end()
    dog.look()


def test_the_first_rank_that_looks_speaks(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK_S", 3600.0)
    ranks = [RankProgress(file_of(tmp_path, rank)) for rank in range(2)]
    for each in ranks:
        each.serve()
    second = Watchdog(1, ranks[1], RankFiles(tmp_path, [0, 1]), True, "m", registry=CollectorRegistry())
    second.look()
    assert second.told is None
    assert not second._first()
    ranks[0]._words[rank_progress.BEAT] -= int(60e9)
    second.look()
    second.look()
    assert (second.told.rank, second.told.cause) == (0, "stopped")
    second.end()


def test_what_a_watchdog_says_of_a_balancer(dog):
    dog.balancer = lambda: (ENDED, 0)
    dog.look()
    assert RankFiles(dog.files._folder).serving()
    assert next(iter(dog.files.states(1.0).values())).balancer == ENDED


def test_connections_and_hosts_that_answer():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
        own, peers, silent = connections()
    assert "127.0.0.1" in own
    assert "127.0.0.1" not in peers
    assert silent == set()
    assert unanswering({"127.0.0.1"}) == set()


WORKER = """
import os, sys
import prometheus_client  # before its mode is known, as in a child of vLLM's server
from aurora_vllm.plugin_status import PluginStatus
from aurora_vllm.settings import Settings
for rank in (1, 2):
    if os.fork() == 0:
        PluginStatus(Settings(), "m", rank, False).engaged("")
        os._exit(0)
    os.wait()
"""


def test_a_server_shows_the_metrics_of_its_other_processes(tmp_path, monkeypatch, warm):
    """Those of each once, and its own by itself, from one folder that only it reads."""
    registry = CollectorRegistry()
    monkeypatch.setattr(served_metrics, "REGISTRY", registry)
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.delenv(served_metrics.MULTIPROCESS, raising=False)
    open_status_folder()
    folder = os.environ[FOLDER]
    assert os.stat(folder).st_mode & 0o777 == 0o700
    open_status_folder()
    assert os.environ[FOLDER] == folder
    PluginStatus(Settings(), "m", 0, True, registry).engaged("")
    assert served_metrics.MULTIPROCESS not in os.environ
    subprocess.run([warm / "python", "-c", WORKER], check=True, timeout=300)
    lines = generate_latest(registry).decode().splitlines()
    assert sorted(line for line in lines if line.startswith("aurora_engaged{")) == [
        f'aurora_engaged{{ep_rank="{rank}",model_name="m",reason=""}} 1.0' for rank in range(3)
    ]
    assert not served_metrics.vllm_collects()
    monkeypatch.setenv(served_metrics.MULTIPROCESS, str(tmp_path))
    assert served_metrics.vllm_collects()
    served_metrics._remove(folder, 1)
    assert os.path.isdir(folder)
    served_metrics._remove(folder, os.getpid())
    assert not os.path.exists(folder)
    monkeypatch.delenv(FOLDER)
