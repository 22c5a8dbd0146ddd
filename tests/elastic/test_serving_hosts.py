"""Runs over several hosts: what hosts say to each other arrives, and a host that disappears costs no answer."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from aurora.algorithms.compile import compile_plan
from aurora.elastic.control_channel import EpochStart, Joined, MemberResult, Progress
from aurora.elastic.elastic_rank import Decided, EpochWork, HeldExperts, NewTokens
from aurora.elastic.host_connection import ToRank, difference
from aurora.elastic.serving import WIRE, about_run, join_run, lead_of
from aurora.errors import BadInput
from aurora.io import save
from aurora.models.decoding import greedy_decode
from aurora.models.hub import model_digest
from aurora.models.loading import load_model
from aurora.runtime.result import Answers, RankResult, Token, TokenTimes
from aurora.runtime.weight_messages import expert_transfers
from aurora.types import Cluster, ControlOptions, ControlReport, PlanOptions, RunOptions
from aurora.types.trace import ControlWindow, PlacementChange
from tests.elastic.certificates import certificate_file
from tests.runtime.test_run import plan_for

sys.path.append(str(Path(__file__).parents[2] / "bench" / "network"))
import net

pytestmark = pytest.mark.full

LEADER = f"{net.SUBNET}.1:29600"
NEW_TOKENS = 24


def on_nodes(plan, *nodes):
    gpus = tuple(replace(gpu, node=node) for gpu, node in zip(plan.cluster.gpus, nodes, strict=True))
    return replace(plan, cluster=Cluster(plan.cluster.name, gpus))


def test_all_that_ranks_and_leader_say_travels(mixtral):
    plan = plan_for([mixtral], 2, PlanOptions(min_replicas=2))
    program, order = compile_plan(plan), plan.models[0].dispatch_L[0]
    held = HeldExperts((((0, 1), (2,)),), ((3,),), (100,))
    moves = expert_transfers(program.placements_M, [[[[]] * 4], [[[]] * 4]], [1])
    report = ControlReport(
        "m", False, 2, 0, {"gain": 1}, 0.5, None, 1.0, 8, 0.1, 0, 0,
        (PlacementChange(0.1, "move", "gain", "pays", (0,), 1, 8, None),), (ControlWindow(0.1, 0.5, 0.6, 1.0, 0),),
    )  # fmt: skip
    work = EpochWork(program, plan.cluster, tuple(moves), order, ({0: (), 5: (1, 2)},), np.ones((1, 2)), ({0: 0.5},), 0.1)
    answers = Answers({0: [1, 2]}, {0: np.ones((2, 3), np.float32)}, {0}, times_R={1: TokenTimes({0: 0.5}, [0.1])})
    result = RankResult([answers], 1.5, [(0.0, 1.0, 0, 1, 0, 2, 3, 1, -1, True, 80)], "gloo", None, [], [], None)  # fmt: skip
    for sent in (
        ToRank(1, EpochStart(1795707705335, 3, (0, 1), work)), Joined(3, (0, 1), held), Progress(3, Decided(1, 0, report)),
        Progress(3, NewTokens(0, [Token(1, 2, True, np.ones((1, 3), np.float32))])), MemberResult(result),
        MemberResult(BadInput("no")), RunOptions(survive=True, lead=LEADER, adapt=ControlOptions()),
    ):  # fmt: skip
        found = WIRE.unpack(WIRE.pack(sent))
        assert type(found) is type(sent)
        assert WIRE.pack(found) == WIRE.pack(sent)
    assert WIRE.unpack(WIRE.pack(program)) == program


def test_what_cannot_begin_is_refused(mixtral, monkeypatch):
    plan, prompts = on_nodes(plan_for([mixtral], 2), 0, 3), [[[1]]]
    monkeypatch.delenv("AURORA_SECRET", raising=False)
    monkeypatch.delenv("AURORA_CERTIFICATE", raising=False)
    lead = RunOptions(survive=True, lead="127.0.0.1:1", node=0)
    join = RunOptions(survive=True, join="127.0.0.1:1", node=3)
    with pytest.raises(
        BadInput, match="`lead`: expected the file of a certificate that all hosts share in AURORA_CERTIFICATE, found none"
    ):
        lead_of(plan, [mixtral], prompts, lead, 0.0)
    with pytest.raises(
        BadInput, match="`join`: expected the file of a certificate that all hosts share in AURORA_CERTIFICATE, found none"
    ):
        join_run(plan, [mixtral], join)
    monkeypatch.setenv("AURORA_CERTIFICATE", str(certificate_file()))
    with pytest.raises(BadInput, match="`node`: expected one of the plan's, 0, 3, found 1"):
        join_run(plan, [mixtral], replace(join, node=1))
    found = lead_of(plan, [mixtral], prompts, lead, 0.0)
    assert found.awaited == {1: "node 3"}
    assert found.local == (0,)
    assert lead_of(plan, [mixtral], prompts, replace(lead, node=None), 0.0).local == ()
    for options, message in (
        ({"survive": False}, "`lead`: is for a run with `survive`, found 127.0.0.1:1 without"),
        ({"join": "127.0.0.1:2"}, "`join`: expected none on the host that leads, found 127.0.0.1:2"),
        ({"lead": None}, "`node`: goes with `lead` or `join`, found 0 without"),
        ({"lead": "here"}, "`lead`: expected ADDRESS:PORT"),
        ({"port": 5}, "`port`: expected none with `survive`"),
        ({"order": "auto"}, "`survive`: expected the planned orders, found auto"),
    ):
        with pytest.raises(BadInput, match=message):
            replace(lead, **options)
    with pytest.raises(BadInput, match="`node`: expected one of the plan's nodes with `join`, found none"):
        replace(join, node=None)


def test_a_host_with_another_plan_or_other_files_is_told_what_differs(mixtral, tmp_path):
    plan = plan_for([mixtral], 2)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    ours = about_run(plan, [mixtral])
    same, planned, files = (
        difference(ours, about_run(its, [model]))
        for its, model in ((plan, mixtral), (on_nodes(plan, 0, 7), mixtral), (plan, tmp_path))
    )
    assert same is None
    assert planned.startswith("expected the plan ")
    found = (model_digest(mixtral)[:16], model_digest(tmp_path)[:16])
    assert files == "expected the files of mixtral-topics {} as the leader has, found {}".format(*found)
    assert difference(ours, {}).startswith("expected aurora's version ")


def listens(pid):
    """Whether a process's host listens on the leader's port."""
    with suppress(OSError):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()]
        return any(row[1].endswith(f":{29600:04X}") and row[3] == "0A" for row in rows)
    return False


def processes(host):
    """The processes on a host."""
    found = []
    for pid in subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True).stdout.split():
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


@contextmanager
def aurora(warm, host, *args):
    """A command on a host; none of its processes is left after the block."""
    command = ["ip", "netns", "exec", host, warm / "aurora", "run", *map(str, args)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"AURORA_CERTIFICATE": str(certificate_file())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        for each in processes(host):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()


@pytest.mark.root
@pytest.mark.skipif(net.refusal() is not None, reason=f"no network of namespaces here: {net.refusal()}")
def test_a_host_whose_link_is_cut_costs_no_answer_and_its_ranks_end_by_themselves(mixtral, tmp_path, warm):
    save(on_nodes(plan_for([mixtral], 3), 0, 0, 1), plan := tmp_path / "plan.json")
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("".join(f"import {number}\n" for number in range(60)))
    leads = (
        "--prompts",
        prompts,
        "--lead",
        LEADER,
        "--node",
        0,
        "-o",
        output,
        "--max-new-tokens",
        NEW_TOKENS,
        "--batch",
        2,
        "--json",
    )
    journal = output.with_suffix(".journal.jsonl")
    with (
        net.network([1e9, 1e9], buffer_bytes=1 << 20) as hosts,
        aurora(warm, hosts[0], plan, "--model", mixtral, "--survive", *leads) as leader,
    ):
        while not listens(leader.pid):
            assert leader.poll() is None, leader.communicate()
            time.sleep(0.1)
        with aurora(
            warm, hosts[1], plan, "--model", mixtral, "--survive", "--join", LEADER, "--node", 1, "--timeout", 3
        ) as joined:
            while not (journal.exists() and journal.read_text().count("\n") > 20):
                assert leader.poll() is None, leader.communicate()
                assert joined.poll() is None, joined.communicate()
                time.sleep(0.02)
            ranks = [each for each in processes(hosts[1]) if each.pid != joined.pid]
            assert ranks
            net.unplug(1)
            said, error = leader.communicate(timeout=300)
            assert leader.returncode == 0, error
            changes = json.loads(said)["changes"]
            lost = [(rank, how.partition(":")[0]) for change in changes for rank, how in change["lost"].items()]
            assert lost == [("2", "node 1 is lost")], changes
            assert [change for change in changes if change["lost"] and change["resumed_s"] is None] == []
            _, error = joined.communicate(timeout=120)
            assert joined.returncode == 2
            assert f"aurora: no leader at {LEADER} for 3 s" in error
            _, alive = psutil.wait_procs(ranks, timeout=300)
            assert alive == []
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(answer["prompt"], answer["finished"]) for answer in answers] == [(number, True) for number in range(60)]
    plain = load_model(mixtral)
    for number in range(0, 60, 6):
        prompt = plain.tokenizer(f"import {number}")["input_ids"]
        expected, _ = greedy_decode(plain.model, prompt, NEW_TOKENS, plain.tokenizer.eos_token_id)
        assert answers[number]["tokens"] == expected
