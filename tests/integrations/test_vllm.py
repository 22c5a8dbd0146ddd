"""Real vLLM on the CPU: with the plugin it answers as without, and counts what transformers counts. `make test-vllm` runs it."""

import importlib.util
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest

from aurora.algorithms.gpu_slots import redundant_experts
from aurora.io import save
from aurora.planner.plan import order_model
from aurora.profiler.merge_records import load_records
from aurora.types import Cluster, Gpu, Hierarchy, ModelPlan, Placement, Plan, PlanOptions
from aurora.types.network import Servers
from tests.integrations import engine

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; make test-vllm installs it"
    ),
    pytest.mark.timeout(3600),
]
slow = pytest.mark.slow
HERE = Path(__file__).parent
ENVIRON = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_INTERPRET": "1",  # for tests of model runner V2
}
LIMIT_S = 600  # for one run of vLLM, which takes 5 to 30 s on two free cores
FORKS = multiprocessing.get_context("forkserver")
PROMPTS = [[random.Random(seed).randrange(1, 250) for _ in range(5 + 7 * seed)] for seed in range(6)]
NEW = 8
OWN_MEMORY = """
import os
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared
named = Shared.make_group_name
Shared.make_group_name = staticmethod(lambda group: named(group) + os.environ["MASTER_PORT"])
"""  # vLLM's tensor-parallel ranks on CPUs share memory, which all servers that were started by rank call the same
CACHE_BYTES = 32 << 20  # of keys and values: eight sequences of 256 tokens take a quarter


def left(group):
    """Whether a process of this group still runs."""
    found = subprocess.run(["ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True)
    return [stat for stat in found.stdout.split() if stat[0] != "Z"]


def free_port():
    from aurora_vllm.child_processes import free_ports

    return free_ports(1)[0]


def fork(function, *arguments):
    """A process that is forked from one that has imported what takes long; the rest of vLLM comes after the plugin, as in any process."""
    FORKS.set_forkserver_preload(["vllm.entrypoints.llm", "compressed_tensors"])
    process = FORKS.Process(target=function, args=arguments)
    with mock.patch.dict(os.environ, ENVIRON):  # of the process that is forked from, which the first one starts
        process.start()
    return process


class Ranks:
    """vLLM processes that were started together; what they answered and said."""

    started: ClassVar = []

    def __init__(self, folder, ranks=1, **job):
        folder.mkdir(parents=True)
        job = {"prompts": PROMPTS, "new_tokens": NEW, **job}
        job["llm"] = {"kv_cache_memory_bytes": CACHE_BYTES, **job.get("llm", {})}
        if ranks > job.get("dp", 1):
            job["before"] = OWN_MEMORY + job.get("before", "")
        (folder / "job.json").write_text(json.dumps(job))
        meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks > 1 else {}
        self.folder, self.ranks, self.port = folder, ranks, meet.get("MASTER_PORT")
        self.processes = []
        for rank in range(ranks):
            own = meet and {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), **meet}
            self.processes.append(fork(engine.perform, folder / "job.json", {**ENVIRON, **own}, folder / f"log-{rank}"))
        self.started.extend(self.processes)

    def wait(self, limit_s=LIMIT_S):
        """The exit codes; None of a process that has not ended in time."""
        until = time.monotonic() + limit_s
        for process in self.processes:
            process.join(max(0.1, until - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        for shared in Path("/dev/shm").glob(f"*cpushm{self.port}_*"):  # see OWN_MEMORY; forked processes leave it there
            shared.unlink()
        return codes

    def said(self):
        return [(self.folder / f"log-{rank}").read_text() for rank in range(self.ranks)]

    def warnings(self):
        """The plugin's own lines, of all ranks, but for the watchdog's: beside other work a rank may be late indeed."""
        said = [line for log in self.said() for line in log.splitlines() if "WARNING" in line and "aurora: " in line]
        return [line for line in said if "watchdog.py" not in line]

    def answers(self):
        found = {}
        codes = self.wait()
        assert codes == [0] * self.ranks, "\n".join(log[-3000:] for log in self.said())
        for rank in range(self.ranks):
            found |= json.loads((self.folder / f"answers-{rank}.json").read_text())["answers"]
        return found


@pytest.fixture(autouse=True)
def nothing_goes_on():
    yield
    while Ranks.started:
        process = Ranks.started.pop()
        process.kill()
        process.join()


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for prompt, answer in expected.items():
        assert found[prompt]["tokens"] == answer["tokens"]
        np.testing.assert_allclose(found[prompt]["logprobs"], answer["logprobs"], atol=1e-4)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Tiny models by name, made on first use."""
    from tests.integrations.tiny import make

    folder = tmp_path_factory.mktemp("models")

    def made(name):
        if not (folder / name).exists():
            make(name, folder / name)
            (architecture,) = json.loads((folder / name / "config.json").read_text())["architectures"]
            fork(engine.inspect_model, architecture).join()
        return folder / name

    return made


@pytest.fixture(scope="session")
def alone(tmp_path_factory, checkpoints):
    """What one rank of vLLM without the plugin answers, by model and prompts."""
    folder, known = tmp_path_factory.mktemp("alone"), {}

    def answers(name, prompts=PROMPTS):
        key = name, str(prompts)
        if key not in known:
            job = {"model": str(checkpoints(name)), "prompts": prompts, "environ": {"VLLM_PLUGINS": ""}}
            known[key] = Ranks(folder / str(len(known)), **job).answers()
        return known[key]

    return answers


def counted(folder, prompts, new_tokens):
    """The model, and (L, E): what transformers counts of the same prompts, one after the other."""
    moe, load_XLE = counted_each(folder, prompts, new_tokens)
    return moe, load_XLE.sum(axis=0)


def counted_each(folder, prompts, new_tokens):
    """The same as `counted`, but (X, L, E) of each prompt."""
    import transformers

    from aurora.models.loading import MoeModel, find_moe_layers
    from aurora.profiler.profile_model import route_round

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    top_k = model.config.num_experts_per_tok
    moe = MoeModel(folder.name, model, None, find_moe_layers(model), top_k)
    passes_X = [route_round(moe, [[prompt]], new_tokens, keep=False) for prompt in prompts]
    return moe, np.array([sum(one.counts_LE for one in passes) for passes in passes_X])


def _tuples(table):
    return tuple(tuple(tuple(each) for each in row) for row in table)


def scattered(checkpoint, ranks, seed=1, most=None, replicas=0, servers=None):
    """A plan with experts anywhere: unequal counts, and in the first layer all of them on rank 0.

    most: if given, no rank holds more, in any layer; replicas: how many experts a layer holds on the next rank as well; servers:
    the cluster's.
    """
    moe, load_LE = counted(checkpoint, PROMPTS[:1], 1)
    from aurora.types import Curve, Profile

    curve = Curve(np.array([1.0]), np.array([1e-6]))
    tokens_TLSE = np.repeat(load_LE[None, :, None, :], ranks, axis=2)
    curves = {"cpu": dict.fromkeys(("gate", "expert", "aggregate"), curve)}
    profile = Profile(checkpoint.name, moe.fingerprint(), tokens_TLSE, moe.top_k, moe.row_bytes, moe.row_bytes, 1000, 0, curves)
    node_G = range(ranks) if servers is None else servers.server_G
    cluster = Cluster(
        "here", tuple(Gpu(f"g{rank}", "cpu", node, 1e9, 1e9, 10**10) for rank, node in enumerate(node_G)), servers
    )
    rng = np.random.default_rng(seed)
    where_LE = rng.integers(0, ranks, load_LE.shape)
    where_LE[0] = 0
    while most is not None and max(np.bincount(where_E, minlength=ranks).max() for where_E in where_LE) > most:
        where_LE = rng.integers(0, ranks, load_LE.shape)
    held_LG = [[np.flatnonzero(where_E == rank).tolist() for rank in range(ranks)] for where_E in where_LE]
    for held_G, where_E in zip(held_LG, where_LE, strict=True):
        for expert in range(replicas):
            held_G[(where_E[expert] + 1) % ranks].append(expert)
    split = [[[0.5 if expert < replicas else 1.0 for expert in held] for held in held_G] for held_G in held_LG]
    placement = Placement(*(_tuples(table) for table in ([held_LG, split] if replicas else [held_LG])))
    made: ModelPlan = order_model(cluster, [profile], placement, "openshop", rng, "")
    seconds = float(made.dispatch_s_L.sum())  # nothing here asks for a plan's own; the planner would first have to be compiled
    return Plan(cluster, (made,), PlanOptions(), seconds, seconds)


def test_the_api_checks_pass():
    """In the vLLM that is installed."""
    from aurora_vllm.vllm_internals.api_checks import check_api, groups

    check_api(*groups())


KEEP_STATE = """
import functools
from vllm.distributed.eplb.eplb_state import EplbState
add_model = EplbState.add_model
@functools.wraps(add_model)
def add_and_keep(self, *args, **named):
    EplbState.kept = self
    add_model(self, *args, **named)
EplbState.add_model = add_and_keep
"""
SAVE_MAP = """
import os, numpy as np
from vllm.distributed.eplb.eplb_state import EplbState
model, = EplbState.kept.model_states.values()
np.save(os.environ["MAP"] + os.environ["RANK"], model.physical_to_logical_map.numpy())
"""


def eplb(redundant, **more):
    """vLLM's options: a rearrangement every four forward passes."""
    config = {"num_redundant_experts": redundant, "step_interval": 4, "window_size": 4, "use_async": False, **more}
    return {"enable_eplb": True, "eplb_config": config}


@pytest.mark.cell("V1", "EPLB")
@pytest.mark.parametrize(
    ("most", "replicas", "given", "order", "in_background"),
    [
        (5, 2, 0, "plan", False),
        (4, 0, 0, "stock", False),
        (5, 0, 0, "stock", False),
        (5, 0, 4, "online", False),
        pytest.param(5, 2, 0, "stock", True, marks=slow),
    ],
    ids=["replicas-planned-order", "no-redundant", "padded", "padded-further-online", "in-background"],
)
def test_eplb_serves_by_the_plan(most, replicas, given, order, in_background, tmp_path, checkpoints, alone):
    """Its first map is the plan, replicas in the slots that the plan leaves free; rearrangements move nothing."""
    checkpoint = checkpoints("qwen3moe")
    plan = scattered(checkpoint, 2, most=most, replicas=replicas)
    save(plan, tmp_path / "plan.json")
    settings = {"aurora": {"plan": str(tmp_path / "plan.json"), "order": order, "record": str(tmp_path / "seen")}}
    run = Ranks(
        tmp_path / "run", 2, model=str(checkpoint), dp=2, additional_config=settings, repeat=2, commands=[["write"]],
        llm=eplb(given, use_async=in_background), before=KEEP_STATE, after=SAVE_MAP, environ={"MAP": str(tmp_path / "map")},
    )  # fmt: skip
    check_same(run.answers(), alone("qwen3moe"))
    assert not run.warnings()
    _, load_LE = counted(checkpoint, PROMPTS, NEW)
    np.testing.assert_array_equal(load_records(tmp_path / "seen").tokens_TLSE.sum(axis=(0, 2)), 2 * load_LE)
    assert run.said()[0].count("Rearranging experts") >= 3  # each begins when the one before has ended
    maps = [np.load(tmp_path / f"map{rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(*maps)
    slots = (8 + (given or redundant_experts(plan.models[0].placement))) // 2
    assert maps[0].shape == (3, 2 * slots)
    check_planned(maps[0], plan)


def check_planned(physical_LP, plan):
    """Every rank holds what the plan gives it, and nothing twice."""
    slots = physical_LP.shape[1] // 2
    for physical_P, held_G in zip(physical_LP, plan.models[0].placement.slots_LG, strict=True):
        for rank, held in enumerate(held_G):
            physical = physical_P[rank * slots : (rank + 1) * slots].tolist()
            assert set(held) <= set(physical)
            assert len(set(physical)) == slots


FAULT = """
import os
import numpy as np
import aurora_vllm.vllm_internals.expert_moves as moves
follow = moves.follow_traffic
def follow_with_a_fault(worker, balancer, *args):
    model, = balancer.model_states.values()
    np.save(os.environ["MAP"] + os.environ["RANK"] + "-first", model.physical_to_logical_map.numpy())
    follow(worker, balancer, *args)
    from aurora.algorithms.control.controller import Controller
    window, calls = Controller.window, []
    def fails_once(self, *args):
        calls.append(0)
        if len(calls) == 2:
            raise RuntimeError("no more memory")
        return window(self, *args)
    Controller.window = fails_once
moves.follow_traffic = follow_with_a_fault
"""  # in planning after the second window, on rank 0; and the map before the first window
SAVE_METRICS = """
import os
import prometheus_client
open(os.environ["MAP"] + os.environ["RANK"] + ".prom", "wb").write(prometheus_client.generate_latest())
"""


@pytest.mark.cell("V1", "adapt")
@pytest.mark.parametrize("in_background", [False, True], ids=["serving-waits", "in-background"])
def test_experts_follow_the_traffic_through_eplb(in_background, tmp_path, checkpoints, alone):
    """From a plan on: answers stay the same while experts move; after an error in planning they stay, then follow again."""
    checkpoint = checkpoints("qwen3moe")
    plan = scattered(checkpoint, 2, most=5, replicas=2)
    save(plan, tmp_path / "plan.json")
    settings = {"adapt": True, "loss": 0.0, "plan": str(tmp_path / "plan.json"), "order": "plan"}
    run = Ranks(
        tmp_path / "run", 2, model=str(checkpoint), dp=2, repeat=5, additional_config={"aurora": settings},
        llm=eplb(0, use_async=in_background),
        before=KEEP_STATE + FAULT, after=SAVE_MAP + SAVE_METRICS, environ={"MAP": str(tmp_path / "map")},
    )  # fmt: skip
    check_same(run.answers(), alone("qwen3moe"))
    maps = [np.load(tmp_path / f"map{rank}.npy") for rank in range(2)]
    np.testing.assert_array_equal(*maps)
    first_LP = np.load(tmp_path / "map0-first.npy")
    check_planned(first_LP, plan)
    assert (maps[0] != first_LP).any()
    assert all(set(physical_P) == set(range(8)) for physical_P in maps[0].tolist())
    (fault,) = run.warnings()
    assert "experts stay where they are: RuntimeError: no more memory" in fault
    said = [line for line in run.said()[0].splitlines() if "aurora: keep (" in line or "aurora: move (" in line]
    moves = [line for line in said if "aurora: move (gain): the placement loses" in line]
    assert moves
    shown = (tmp_path / "map0.prom").read_text()
    assert 'aurora_control_failures_total{ep_rank="0",' in shown
    counted = float(re.search(r"aurora_control_decisions_total{.*kind=.gain.*} (.*)", shown)[1])
    assert 0 < counted <= len(moves) if in_background else counted == len(moves)  # a thread may decide after metrics are saved
    assert float(re.search(r"aurora_control_moved_bytes_total{.*} (.*)", shown)[1]) > 0
    assert "aurora_control_heartbeat_timestamp_seconds" in (tmp_path / "map1.prom").read_text()


SWITCHING = [[3 + 20 * index] * 60 for index in range(12)]  # prompts of other tokens choose other experts
UNTIL_FOLLOWED = """
import aurora_vllm.vllm_internals.expert_moves as moves
from tests.integrations.engine import slowest
held_K, load_LE = moves.held_K, job["load_KLE"][kind]
del held_K[kind + 1 :]
held_K.append(moves.held())
over = slowest(load_LE, held_K[-1]) < 0.95 * slowest(load_LE, held_K[kind])
"""
SAVE_HELD = """
import json, os
import aurora_vllm.vllm_internals.expert_moves as moves
open(os.environ["MAP"] + os.environ["RANK"], "w").write(json.dumps(moves.held_K))
"""


def switching(checkpoint, held_LG):
    """Prompts that choose most of what the first rank holds, and then the others, each until experts have followed them."""
    _, load_XLE = counted_each(checkpoint, SWITCHING, NEW)
    first_X = [sum(load_LE[layer][list(held_G[0])].sum() for layer, held_G in enumerate(held_LG)) for load_LE in load_XLE]
    most_X = np.argsort(first_X)[::-1]
    kinds = [most_X[:4].tolist(), most_X[4:].tolist()]
    loads = [load_XLE[kind].sum(axis=0).tolist() for kind in kinds]
    return {"prompts": SWITCHING, "rounds": kinds, "load_KLE": loads, "until": UNTIL_FOLLOWED}


def check_followed(run, job, folder):
    """After each kind of prompts, the same experts are in place on all ranks, by a decision, and suit that kind better than before."""
    held_K, *others = (json.loads((folder / f"map{rank}").read_text()) for rank in range(run.ranks))
    assert others == [held_K] * (run.ranks - 1)
    for held_LG in held_K:
        assert [list(map(len, held_G)) for held_G in held_LG] == [list(map(len, held_G)) for held_G in held_K[0]]
        assert all({expert for held in held_G for expert in held} == set(range(8)) for held_G in held_LG)
    said_K = run.said()[0].split("engine.py: no more prompts of kind ")
    for kind, load_LE in enumerate(job["load_KLE"]):
        assert re.search(r"plugin_status\.py:.*aurora: move \(gain\)", said_K[kind])
        before, after = (engine.slowest(load_LE, held_LG) for held_LG in held_K[kind : kind + 2])
        assert after < 0.95 * before


KEEP_EPLB = """
import aurora_vllm.vllm_internals.expert_moves as moves
follow = moves.follow_traffic
def follow_and_keep(worker, balancer, facts, *args):
    import aurora_vllm.eplb_mover as eplb_mover
    eplb_mover.PATIENCE_S = 300  # on a machine that has much else to do
    follow(worker, balancer, facts, *args)
    model, = balancer.model_states.values()
    moves.held = lambda: model.physical_to_logical_map.view(facts.layers, facts.ranks, -1).tolist()
    moves.held_K = [moves.held()]
moves.follow_traffic = follow_and_keep
"""


@pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=slow)], ids=["serving-waits", "in-background"])
def test_experts_follow_traffic_that_switches_on_four_ranks(in_background, tmp_path, checkpoints, alone):
    """The placement changes for both kinds of prompts, and answers are as without."""
    checkpoint = checkpoints("qwen3moe")
    job = switching(checkpoint, [[[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]] * 3)
    run = Ranks(
        tmp_path / "run", 4, model=str(checkpoint), dp=4, **job,
        additional_config={"aurora": {"adapt": True}}, llm=eplb(4, use_async=in_background),
        before=KEEP_EPLB, after=SAVE_HELD, environ={"MAP": str(tmp_path / "map")},
    )  # fmt: skip
    check_same(run.answers(), alone("qwen3moe", SWITCHING))
    assert not run.warnings()
    check_followed(run, job, tmp_path)


def test_off_it_is_not_there(tmp_path, checkpoints, alone):
    """No setting: no class of vLLM's is another, nothing is said, the answers are the same to the last bit."""
    after = (
        "import vllm.model_executor.custom_op as o, vllm.distributed.device_communicators.all2all as a;"
        "assert 'RoutedExperts' not in o.op_registry_oot and a.AgRsAll2AllManager.__module__ == a.__name__"
    )
    ranks = Ranks(tmp_path / "off", model=str(checkpoints("qwen3moe")), environ={"VLLM_PLUGINS": "aurora"}, after=after)
    assert ranks.answers() == alone("qwen3moe")
    assert not ranks.warnings()


@pytest.mark.cell("V1", "record", "order", "place by maps")
@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", *(pytest.param(n, marks=slow) for n in ("olmoe", "qwen2moe"))])
def test_two_ranks_answer_as_one_and_count_as_transformers(name, tmp_path, checkpoints, alone):
    """Plan off, then orders made for every batch with a record of it, then a random plan: with chunks and an idle rank."""
    checkpoint = checkpoints(name)
    off = Ranks(tmp_path / "off", 2, model=str(checkpoint), dp=2, additional_config={"aurora": {}})
    check_same(off.answers(), alone(name))
    online = {"order": "online", "record": str(tmp_path / "seen")}
    on = Ranks(tmp_path / "on", 2, model=str(checkpoint), dp=2, additional_config={"aurora": online}, commands=[["write"]])
    check_same(on.answers(), alone(name))
    profile = load_records(tmp_path / "seen")
    moe, load_LE = counted(checkpoint, PROMPTS, NEW)
    np.testing.assert_array_equal(profile.tokens_TLSE.sum(axis=(0, 2)), load_LE)
    assert profile.fingerprint == moe.fingerprint()
    assert (profile.top_k, profile.dispatch_bytes, profile.expert_bytes) == (moe.top_k, moe.row_bytes, moe.expert_bytes)

    save(scattered(checkpoint, 2), tmp_path / "plan.json")
    settings = {"aurora": {"plan": str(tmp_path / "plan.json"), "order": "plan"}}
    chunked = {"max_num_batched_tokens": 32, "idle": [1]}
    planned = Ranks(tmp_path / "planned", 2, model=str(checkpoint), dp=2, additional_config=settings, **chunked)
    check_same(planned.answers(), alone(name))
    assert not planned.warnings()


SMALL_BUFFERS = """
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup
start = WorkerStartup.start
def start_with_small_buffers(self):
    from aurora_vllm import pushed_alltoall
    pushed_alltoall.BUFFER_BYTES = 2 * 2 * 320 * 16
    return start(self)
WorkerStartup.start = start_with_small_buffers
"""  # for 16 tokens of each of two ranks, in rows of 320 bytes


@slow
@pytest.mark.parametrize("plan", [False, True])
def test_all_to_alls_by_push_answer_as_one_rank(plan, tmp_path, checkpoints, alone):
    """Through vLLM's manager, in Triton's interpreter: all at once, and by a plan with unequal counts, in rounds."""
    checkpoint, settings = checkpoints("qwen3moe"), {"order": "push", "required": True}
    if plan:
        save(scattered(checkpoint, 2), tmp_path / "plan.json")
        settings["plan"] = str(tmp_path / "plan.json")
    ranks = Ranks(
        tmp_path / "run", 2, model=str(checkpoint), dp=2, prompts=PROMPTS[:3], new_tokens=4, max_num_batched_tokens=32,
        additional_config={"aurora": settings}, before=SMALL_BUFFERS if plan else "",
    )  # fmt: skip
    found, expected = ranks.answers(), alone("qwen3moe", PROMPTS[:3])
    check_same(found, {prompt: {name: each[:4] for name, each in answer.items()} for prompt, answer in expected.items()})
    (said,) = [line for log in ranks.said() for line in log.splitlines() if ", all-to-alls by push, no record" in line]
    assert "INFO" in said


@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        ("qwen3moe", 4, {"dp": 4}),
        ("qwen3moe", 4, {"dp": 2}),
        ("qwen2moe", 4, {"dp": 2}),
        ("qwen3moe", 2, {"dp": 1}),
        pytest.param("qwen3moe", 2, {"dp": 2, "eager": False}, marks=slow),
        pytest.param("qwen2moe", 2, {"dp": 2, "eager": False}, marks=slow),
    ],
    ids=["dp4", "tp2xdp2", "tp2xdp2-shared-experts", "tp2", "compiled", "compiled-shared-experts"],
)
def test_every_layout_answers_as_one_rank(name, ranks, more, tmp_path, checkpoints, alone):
    checkpoint = checkpoints(name)
    save(scattered(checkpoint, ranks), tmp_path / "plan.json")
    order = {"order": "plan"} if more["dp"] > 1 else {}
    settings = {"aurora": {"plan": str(tmp_path / "plan.json"), "record": str(tmp_path / "seen"), **order}}
    run = Ranks(tmp_path / "run", ranks, model=str(checkpoint), additional_config=settings, commands=[["write"]], **more)
    check_same(run.answers(), alone(name))
    assert not run.warnings()
    _, load_LE = counted(checkpoint, PROMPTS, NEW)
    np.testing.assert_array_equal(load_records(tmp_path / "seen").tokens_TLSE.sum(axis=(0, 2)), load_LE)


IN_TWO_HOPS = """
from aurora_vllm.vllm_internals.worker_startup import WorkerStartup
start = WorkerStartup.start
def start_and_count(self):
    started = start(self)
    from aurora.moe import server_layout
    from aurora_vllm import layer_alltoall
    layer_alltoall.SMALL_BYTES = 0
    class Counted(server_layout.RowPerServer):
        exchanges = []
        def dispatch(self, exchange):
            self.exchanges.append(len(self.sizes_SRR))
            return super().dispatch(exchange)
    server_layout.RowPerServer = Counted
    return started
WorkerStartup.start = start_and_count
"""  # however few bytes there are


@pytest.mark.parametrize("eplb_too", [False, True])
def test_two_servers_of_two_ranks_answer_as_one_rank(eplb_too, tmp_path, checkpoints, alone):
    """All-to-alls in two hops: planned so and levelled, and asked for by a setting for a plan with replicas, which EPLB places."""
    checkpoint, server_G = checkpoints("qwen3moe"), (0, 1, 0, 1)
    hierarchy = Hierarchy(np.array(server_G), 4) if eplb_too else Hierarchy(np.array(server_G), 3, 1)
    servers = Servers.of(server_G, 1e8)
    plan = scattered(checkpoint, 4, most=3, replicas=2, servers=servers) if eplb_too else scattered(checkpoint, 4)
    settings = {"plan": str(tmp_path / "plan.json"), "order": "plan"}
    if eplb_too:
        settings["all_to_all"] = "hierarchical"
    else:
        made = replace(plan.models[0], hierarchy=hierarchy)
        plan = replace(plan, models=(made,))
    save(plan, tmp_path / "plan.json")
    run = Ranks(
        tmp_path / "run", 4, model=str(checkpoint), dp=4, additional_config={"aurora": settings}, before=IN_TWO_HOPS,
        after=f"from aurora.moe.server_layout import RowPerServer as R; assert set(R.exchanges) == {{{hierarchy.steps}}}",
        llm=eplb(0) if eplb_too else {},
    )  # fmt: skip
    check_same(run.answers(), alone("qwen3moe"))
    assert not run.warnings()
    (said,) = [line for log in run.said() for line in log.splitlines() if " and in two hops over 2 servers, no record" in line]
    assert ("in an order made for each batch" if eplb_too else "in the plan's order") in said


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("other model", "and other router weights"),
        ("other ranks", "the plan is for 4 ranks, vLLM runs 2 expert-parallel ranks"),
        ("a rank without the plugin", "rank 1 said nothing within 5 s; is the plugin there?"),
    ],
)
def test_what_does_not_fit_is_said_once_and_vllm_serves(fault, sentence, tmp_path, checkpoints, alone):
    checkpoint, path, more = checkpoints("qwen3moe"), tmp_path / "plan.json", {}
    settings = {"plan": str(path)}
    if fault == "other model":
        from tests.integrations.tiny import make

        make("qwen3moe", tmp_path / "another", seed=5)
        save(scattered(tmp_path / "another", 2), path)
    else:
        save(scattered(checkpoint, 4 if fault == "other ranks" else 2), path)
    if fault == "a rank without the plugin":  # which needs the repairs for vLLM to serve on CPUs at all
        more = {"environ_1": {"VLLM_PLUGINS": "aurora-on-cpu"}}
        more["before"] = "from aurora_vllm.vllm_internals import worker_startup; worker_startup.AGREE_S = 5"
    run = Ranks(tmp_path / "run", 2, model=str(checkpoint), dp=2, additional_config={"aurora": settings}, **more)
    check_same(run.answers(), alone("qwen3moe"))
    (warning,) = run.warnings()
    assert any(part in warning for part in sentence.split("|"))
    assert "as it would without the plugin" in warning


def test_another_plugin_has_the_class(tmp_path, checkpoints, alone):
    theirs = (
        "from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as R;"
        "R.register_oot(name='RoutedExperts')(type('Theirs', (R,), {}))"
    )
    run = Ranks(tmp_path / "run", model=str(checkpoints("qwen3moe")), before=theirs, additional_config={"aurora": {}})
    assert run.answers() == alone("qwen3moe")
    (warning,) = run.warnings()
    assert "another plugin has taken RoutedExperts" in warning


def test_a_rank_that_dies_is_named(tmp_path, checkpoints):
    settings = {"aurora": {"order": "online"}}
    run = Ranks(tmp_path / "run", 2, model=str(checkpoints("qwen3moe")), dp=2, additional_config=settings, dies=1, repeat=2)
    codes = run.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None)
    assert "expert-parallel rank 1 is gone" in run.said()[0]


class Server:
    """`vllm serve` of one checkpoint on two data-parallel ranks; ready inside `with`, ended after it."""

    def __init__(self, folder, checkpoint, settings, *options):
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint, self.port, self.log = str(checkpoint), free_port(), folder / "log"
        self._command = [
            str(Path(sys.executable).parent / "vllm"), "serve", self.checkpoint, "--port", str(self.port),
            "--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager", "--skip-tokenizer-init",
            "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16", "--max-num-batched-tokens", "256",
            "--no-enable-prefix-caching", "--additional-config", json.dumps({"aurora": settings}), *options,
        ]  # fmt: skip

    def __enter__(self):
        environ = {**os.environ, **ENVIRON, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        del environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self._command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(LIMIT_S)
        until = time.monotonic() + LIMIT_S
        while left(self.process.pid) and time.monotonic() < until:
            time.sleep(0.5)
        assert not left(self.process.pid)

    def wait_until_ready(self):
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                return self.ask("/health")
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < until, self.log.read_text()[-3000:]
                time.sleep(1)

    def ask(self, path, body=None, header={}):  # noqa: B006
        data, header = None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json", **header}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, header)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return reply.read().decode()

    def complete(self, index):
        body = {"model": self.checkpoint, "prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": NEW, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
        return json.loads(self.ask("/v1/completions", body))["choices"][0]["token_ids"]


def expected(answers, count):
    return [answers[str(index % len(PROMPTS))]["tokens"] for index in range(count)]


@slow
def test_served_over_http(tmp_path, checkpoints, alone):
    """32 requests at once, all answered as one rank would; metrics on vLLM's own page; a record on command; no process left."""
    checkpoint = checkpoints("qwen3moe")
    save(scattered(checkpoint, 2), tmp_path / "plan.json")
    settings = {"plan": str(tmp_path / "plan.json"), "order": "plan", "record": str(tmp_path / "seen"), "record_every_s": 1}
    with Server(tmp_path, checkpoint, settings) as server:
        server.wait_until_ready()
        with ThreadPoolExecutor(32) as pool:
            tokens = list(pool.map(server.complete, range(32)))
        assert tokens == expected(alone("qwen3moe"), 32)
        server.ask("/collective_rpc", {"method": "aurora", "args": ["write"]})
        time.sleep(2)
        server.complete(0)
        metrics = server.ask("/metrics")
        profile = load_records(tmp_path / "seen")
    for rank in range(2):
        assert f'aurora_exchange_bytes_total{{ep_rank="{rank}",model_name="{checkpoint}",phase="dispatch"}}' in metrics
        assert f'aurora_expert_balancedness{{ep_rank="{rank}",layer="0",model_name="{checkpoint}"}}' in metrics
        assert f'aurora_engaged{{ep_rank="{rank}",model_name="{checkpoint}",reason=""}} 1.0' in metrics
    (line,) = [
        line
        for line in server.log.read_text().splitlines()
        if " places the experts by expert maps, all-to-alls in the plan's order" in line
    ]
    assert "INFO" in line
    assert "plan.json, written 0.0 days ago" in line
    assert profile.tokens_TLSE.sum() > 32


@slow
def test_ctrl_c_writes_what_was_recorded(tmp_path, checkpoints):
    """Long before `record_every_s` is over; a command outside the folder and a bad one are sentences."""
    with Server(tmp_path, checkpoints("qwen3moe"), {"record": str(tmp_path / "seen"), "record_every_s": 3600}) as server:
        server.wait_until_ready()
        tokens = [server.complete(index) for index in range(4)]
        for words, said in ((["start", "/elsewhere"], "expected a folder in"), (["begin"], "expected start, write or stop")):
            answer = server.ask("/collective_rpc", {"method": "aurora", "args": words})
            assert "refused: " in answer
            assert said in answer
        assert not (tmp_path / "seen").exists()
    assert all(len(each) == NEW for each in tokens)
    rows = sum(len(PROMPTS[index]) + NEW - 1 for index in range(4))
    assert load_records(tmp_path / "seen").tokens_TLSE.sum(axis=(0, 2, 3)).tolist() == [2 * rows] * 3


@slow
def test_the_tutorial_runs_as_it_stands(tmp_path):
    """From a tiny model to a served plan, and prints what the page shows, numbers aside; only the port is another, so that it is free."""
    text = (HERE.parents[1] / "docs" / "tutorials" / "vllm.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    script = "".join(blocks).replace("8000", str(free_port()))
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with (tmp_path / "said").open("w") as said:
        walk = subprocess.Popen(
            ["bash", "-eux", "-c", script],
            cwd=tmp_path,
            env=environ,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = walk.wait(LIMIT_S)
    finally:
        if left(walk.pid):
            os.killpg(walk.pid, signal.SIGKILL)
    said, log = (tmp_path / "said").read_text(), (tmp_path / "server.log").read_text()
    assert code == 0, f"{said[-3000:]}\n{log[-3000:]}"
    shown = re.findall(r"^    (.*)$", re.sub(r"^```sh\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    assert len(shown) >= 7
    for line in shown:
        assert re.search(re.sub(r"\d+", r"\\d+", re.escape(line.replace("/home/me", str(tmp_path)))), said), line
    assert len(re.findall(r'^aurora_engaged\{ep_rank="[01]",model_name="model",reason=""\} 1.0$', said, re.MULTILINE)) == 2
