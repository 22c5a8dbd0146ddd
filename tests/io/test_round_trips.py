"""Files: round trips, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import aurora
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.compile import compile_plan
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import BadInput, BrokenPlan
from aurora.io import load_cluster, load_plan, load_profile, save, shipped
from aurora.io.plans import _digest
from aurora.planner.plan import make_plan
from aurora.simulator.interpreter import simulate_plan
from aurora.types import ComputeCurves, Curve, Exchange, Hierarchy, PlanOptions, Servers, SyntheticOptions
from tests.conftest import cluster
from tests.strategies import clusters, profiles, servers

CONFIG = {"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8}
GPU = """
[[gpu]]
name = "g"
kind = "k"
node = 0
out_Bps = 1e9
in_Bps = 1e9
memory_bytes = 1000
"""


@pytest.fixture
def profile():
    drawn = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=2, window_tokens=32, windows=2))
    overhead = Curve(np.array([1.0, 8.0]), np.array([0.5, 0.75]))  # of grouped kernels
    return replace(drawn, curves={kind: {**phases, "overhead": overhead} for kind, phases in drawn.curves.items()})


@pytest.fixture
def plan(profile):
    return make_plan(cluster(1e6, 2e6, startup_s=0.001), [profile, profile], PlanOptions(order="sjf"), ["a.npz", "a.npz"])


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(clusters(n), st.none() | servers(n), profiles(n))))
def test_plans_and_profiles_come_back_as_they_were(tmp_path_factory, case):
    folder = tmp_path_factory.mktemp("store")
    machines, source = replace(case[0], servers=case[1]), case[2]
    assume(source.tokens_TLSE.any())
    source = replace(source, dense_layers=(0, 2), tokens_TLSE=source.tokens_TLSE + source.tokens_TLSE.sum())  # like layers
    made = make_plan(machines, [source])
    save(source, folder / "p.npz")
    save(made, folder / "plan.json")
    assert load_profile(folder / "p.npz").digest == source.digest
    assert load_plan(folder / "plan.json") == made
    assert made.models[0].dense_layers == (0, 2)


@pytest.mark.parametrize("tiers", [1, 3])
@pytest.mark.parametrize("method", ORDER)
def test_orders_come_back_with_their_parts_and_tiers(tmp_path, plan, method, tiers):
    made = ORDER[method](np.array([[0, 700], [300, 0]]), plan.cluster.network, rng=np.random.default_rng(0))
    made = replace(made, tier_X=np.arange(len(made.pairs_X2)) % tiers) if tiers > 1 else made
    orders = {"dispatch_L": (made,) * 2, "combine_L": (made.reversed,) * 2}
    changed = replace(plan, models=tuple(replace(model, **orders) for model in plan.models))
    save(changed, tmp_path / "plan.json")
    back = load_plan(tmp_path / "plan.json")
    assert back == changed
    assert repr(back.models[0].dispatch_L[0]) == repr(made)


@pytest.fixture
def curves(profile):
    return ComputeCurves("m", "f", 2, 16, 100, profile.curves, {"tool": "test"})


@pytest.mark.parametrize("kind", ["cluster", "plan", "profile", "trace", "curves"])
def test_every_kind_comes_back_equal_each_time_it_is_loaded(tmp_path, plan, profile, curves, kind):
    servers = Servers.of([0, 0], 1.0)
    values = {
        "cluster": ("c.toml", replace(cluster(4.0, 4.0), servers=servers)),
        "plan": ("p.json", plan),
        "profile": ("p.npz", profile),
        "trace": ("t.npz", simulate_plan(plan, [profile, profile])),
        "curves": ("c.npz", curves),
    }
    name, value = values[kind]
    save(value, tmp_path / name)
    first, second = aurora.load(tmp_path / name), aurora.load(tmp_path / name)
    assert first is not second
    assert first == second == value


def save_about(value, path, change):
    """Saves a value with other values in its header."""
    save(value, path)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["about"] = np.array(json.dumps(json.loads(str(arrays["about"])) | change))
    np.savez(path, **arrays)


@pytest.mark.parametrize("kind", ["profile", "trace", "curves"])
def test_other_schemas_of_arrays_are_refused(tmp_path, plan, profile, curves, kind):
    value = {"profile": profile, "trace": simulate_plan(plan, [profile, profile]), "curves": curves}[kind]
    save_about(value, tmp_path / "x.npz", {"schema": 9})
    with pytest.raises(BadInput, match=r"x\.npz: expected schema = [12], found 9; make it anew with aurora"):
        aurora.load(tmp_path / "x.npz")


def test_other_files_are_not_loaded(tmp_path):
    assert len(aurora.load(shipped("clusters/demo-4.toml"))) == 4
    with pytest.raises(BadInput, match=r"expected a \.toml, \.json or \.npz file"):
        aurora.load(tmp_path / "x.txt")


def test_the_papers_mixed_cluster():
    assert sorted(set(load_cluster(shipped("clusters/paper-mixed-8.toml")).out_Bps_G * 8 / 1e9)) == [40, 50, 80, 100]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("schema = 1\nfoo = 3\n" + GPU, "unknown foo; expected fabric, gpu, incast, name, schema$"),
        ("schema = 1\n" + GPU + "colour = 'red'\n", r"gpu\[0\]: unknown colour; expected count, failure_rate, in_Bps, kind, "),
        (
            "schema = 1\n" + GPU.replace("in_Bps = 1e9", "in_Bps = nan"),
            "gpu 'g': in_Bps must be a number above zero, found nan",
        ),
        (
            "schema = 1\n" + GPU.replace("in_Bps = 1e9", "in_Bps = 'fast'"),
            r"c\.toml: gpu\[0\]\.in_Bps: expected a number, found 'fast'",
        ),
        ("schema = 1\n" + GPU.replace("in_Bps = 1e9\n", ""), r"gpu\[0\]: 'in_Bps' is missing"),
        ("schema = 1\n" + GPU + "count = 1000000000\n", r"gpu\[0\]\.count: expected a whole number <= 4096, found 1000000000"),
        ("schema = 1\n" + 2 * (GPU + "count = 4000\n"), "expected at most 4096 GPUs, found 8000"),
        ('schema = 1\nname = "a\\u001b[31m"\n' + GPU, r"name must be text without control characters, found 'a\\x1b\[31m'"),
        ("schema = 1\n" + GPU.replace("1e9", "1" + "0" * 400), r"gpu\[0\]\.out_Bps: number out of range, found 1000"),
    ],
)
def test_bad_clusters(tmp_path, toml, message):
    file = tmp_path / "c.toml"
    file.write_text(toml)
    with pytest.raises(BadInput, match=message) as error:
        load_cluster(file)
    assert str(file) in str(error.value)


LEAVES = '[fabric]\nkind = "leaf-spine"\nspines = 2\nuplink_Bps = 5e8\n'


def fabric_of(tmp_path, toml):
    file = tmp_path / "c.toml"
    file.write_text("schema = 1\n" + toml)
    return load_cluster(file).servers


def test_the_gpus_of_a_leaf_share_its_uplinks(tmp_path):
    second = GPU.replace("node = 0", "node = 1")
    by_node = fabric_of(tmp_path, LEAVES + GPU + "count = 2\n" + second)
    assert by_node == Servers((0, 0, 1), 1e9, (0, 0, 1))
    by_rack = fabric_of(tmp_path, LEAVES + GPU + "rack = 'r'\n" + second + "rack = 'r'\n" + second + "rack = 'q'\n")
    assert by_rack == Servers((0, 0, 1), 1e9, (0, 0, 1))


def test_the_shipped_leaves_are_two_to_one():
    machines = load_cluster(shipped("clusters/leaf-spine-16.toml"))
    assert machines.servers.server_G == tuple(np.repeat(range(4), 4).tolist()) == machines.servers.nic_G
    assert machines.out_Bps_G[:4].sum() == 2 * machines.servers.nic_Bps
    assert load_cluster(shipped("clusters/h100-servers-32.toml")).servers.nic_Bps == 50e9


@pytest.mark.parametrize(
    ("kind", "fabric", "message"),
    [
        ("", "", "fabric: 'kind' is missing, expected one of 'servers', 'nvidia-smi', 'graph', 'leaf-spine'"),
        ("torus", "", r"fabric\.kind: expected one of 'servers', .*, found 'torus'"),
        ("leaf-spine", "spines = 0\nuplink_Bps = 1", r"fabric\.spines: expected a whole number >= 1, found 0"),
        (
            "servers",
            "nic_Bps = 1\nnic_of_gpu = [0]",
            "servers: expected a NIC for each of 2 GPUs, found 1",
        ),
        ("servers", "nic_Bps = 1\nnic_of_gpu = [0, 1]\nshared_nic = true", "shared_nic or nic_of_gpu, found both"),
        ("servers", "nic_Bps = 1\nnic_of_gpu = [0, 0]\nserver_of_gpu = [0, 1]", "each NIC in one server, found one in several"),
        ("graph", "links = [{from='g', to='s', Bps=1, both=1}]", r"fabric\.links\[0\]\.both: expected true or false, found 1"),
        ("graph", "links = [{from='g', to=7, Bps=1}]", "expected ranks 0 to 1, found 7"),
        ("graph", "links = [{from='g', to='s', Bps=1}]", "found none from 0 to 1"),
    ],
)
def test_bad_fabrics(tmp_path, kind, fabric, message):
    fabric = f"[fabric]\nkind = '{kind}'\n{fabric}\n" if kind else f"[fabric]\n{fabric}\n"
    with pytest.raises(BadInput, match=message) as error:
        fabric_of(tmp_path, fabric + GPU + GPU.replace('"g"', '"h"') + "rack = 'r'\n" * (kind != "leaf-spine"))
    assert str(error.value).count("c.toml") == 1


@pytest.mark.parametrize("level_from", [None, 7])
def test_hierarchical_plans_come_back_and_compile(tmp_path, level_from):
    source = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=4, window_tokens=8, token_level=True))
    made = make_plan(cluster(4.0, 4.0, 4.0, 4.0), [source, source])
    hierarchy = Hierarchy(np.array([0, 0, 1, 1]), 2, level_from)
    models = (replace(made.models[0], hierarchy=hierarchy), made.models[1])
    save(replace(made, models=models), tmp_path / "plan.json")
    back = load_plan(tmp_path / "plan.json")
    assert [model.hierarchy for model in back.models] == [hierarchy, None]
    assert ("level_from" in (tmp_path / "plan.json").read_text()) == (level_from is not None)
    ops_ML = compile_plan(back).ops_ML
    assert {op.hierarchy for op in ops_ML[0][0] if isinstance(op, Exchange)} == {hierarchy}
    assert {op.hierarchy for op in ops_ML[1][0] if isinstance(op, Exchange)} == {None}
    with pytest.raises(BadInput, match="expected the servers of 4 ranks, found 2"):
        replace(made.models[0], hierarchy=Hierarchy(np.array([0, 1])))


def test_names_that_say_no_single_gpu(tmp_path):
    with pytest.raises(BadInput, match="expected one GPU named 'g', found 2; give its rank"):
        fabric_of(tmp_path, "[fabric]\nkind = 'graph'\nlinks = [{from='g', to='s', Bps=1}]\n" + GPU + GPU)
    with pytest.raises(BadInput, match="expected a rack for each GPU or for none, found none for 'g'"):
        fabric_of(tmp_path, LEAVES + GPU + GPU + "rack = 'r'\n")


def test_count_repeats_a_gpu(tmp_path):
    (tmp_path / "c.toml").write_text("schema = 1\n" + GPU + "count = 3\n")
    assert [g.name for g in load_cluster(tmp_path / "c.toml").gpus] == ["g-0", "g-1", "g-2"]


def model(plan):
    return plan["models"][0]


def layer(plan):
    return model(plan)["layers"][0]


def gpu(plan):
    return plan["cluster"]["gpu"][0]


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda p: p.update(schema=1), BadInput, "expected schema = 5, found 1; make it anew with aurora plan"),
        (lambda p: model(p).update(top_k="2"), BadInput, r"p\.json: models\[0\]\.top_k: expected a whole number, found '2'"),
        (lambda p: layer(p).update(slots=[[0], [1]]), BadInput, "expected experts 0..1 once|expected experts"),
        (lambda p: p["cluster"]["gpu"].pop(), BadInput, "expected a placement on 1 GPUs, found one on 2"),
        (lambda p: layer(p)["dispatch"].update(pairs="0>1 0>1"), BrokenPlan, "ordered pairs once"),
        (
            lambda p: layer(p)["dispatch"].update(pairs="0>1 1-0"),
            BadInput,
            "dispatch.pairs: expected text matching regex .*, found '0>1 1-0'",
        ),
        (lambda p: layer(p).update(combine="backwards"), BadInput, "combine: expected one of 'reversed', found 'backwards'"),
        (lambda p: p.update(objective_s=0.0), BrokenPlan, "below its bound"),
        (lambda p: model(p).update(model="a\x1b[2J"), BadInput, "model and fingerprint must be text without control"),
        (lambda p: p.update(objective_s=2 * p["objective_s"]), BrokenPlan, "was changed after it was made"),
        (lambda p: p.update(gap=0.5, digest=""), BrokenPlan, "was changed after it was made"),
        (
            lambda p: model(p).update(hierarchy={"servers": [0, 1.5], "chunks": 1}),
            BadInput,
            r"hierarchy\.servers\[1\]: expected a whole number",
        ),
    ],
)
def test_edited_plans_are_judged_on_loading(tmp_path, plan, edit, error, message):
    save(plan, tmp_path / "p.json")
    found = json.loads((tmp_path / "p.json").read_text())
    edit(found)
    if error is BrokenPlan and "changed" not in message:
        found["digest"] = _digest(found)
    (tmp_path / "p.json").write_text(json.dumps(found))
    with pytest.raises(error, match=message):
        load_plan(tmp_path / "p.json")


def test_a_combine_is_written_only_if_it_is_not_the_dispatch_backwards(tmp_path, plan):
    save(plan, tmp_path / "p.json")
    found = json.loads((tmp_path / "p.json").read_text())
    layer = found["models"][0]["layers"][0]
    assert layer["combine"] == "reversed"
    back = " ".join(">".join(pair.split(">")[::-1]) for pair in layer["dispatch"]["pairs"].split()[::-1])
    layer["combine"] = {**layer["dispatch"], "pairs": back}
    found["digest"] = _digest(found)
    (tmp_path / "p.json").write_text(json.dumps(found))
    assert load_plan(tmp_path / "p.json") == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_TLSE": np.full((1, 1, 1, 1), -1)}, "zero or more"),
        ({"curve_0_gate": np.array([[1.0], [5e294]])}, "expected tokens and seconds up to 1e[+]12, found 5e[+]294"),
        (
            {"tokens_TLSE": np.array([object()], dtype=object)},
            "bad.npz: expected an aurora profile, found another file, .*: Object arrays",
        ),
        ({"tokens_TLSE": np.zeros((1, 1, 1, 1), dtype=np.int64)}, "expected traffic, found no token"),
        ({"zeros": np.zeros(10**6), "curve_0_zeros": np.zeros(1)}, "unknown arrays curve_0_zeros, zeros in an aurora profile"),
    ],
)
def test_edited_profiles_are_refused(tmp_path, profile, change, message):
    save(profile, tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as file:
        arrays = {**file, **change}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(BadInput, match=message):
        load_profile(tmp_path / "bad.npz")


def test_names_in_arrays_have_no_control_characters(tmp_path, profile):
    for change in ({"model": "a\x1b[2J"}, {"model": "a\0"}, {"kinds": ["a\n"]}):
        save_about(profile, tmp_path / "p.npz", change)
        with pytest.raises(BadInput, match="model, fingerprint and kinds must be text without control characters"):
            load_profile(tmp_path / "p.npz")


def test_links_keep_pointing(tmp_path, profile):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "real" / "p.npz")
    save(profile, tmp_path / "link.npz")
    assert (tmp_path / "link.npz").is_symlink()
    assert load_profile(tmp_path / "real" / "p.npz").digest == profile.digest


def test_only_aurora_values_are_saved(tmp_path):
    with pytest.raises(BadInput, match="expected a Cluster, Plan, Profile, Trace or ComputeCurves, found int"):
        save(5, tmp_path / "x.npz")


def test_a_trace_is_no_profile(tmp_path, plan, profile):
    save(simulate_plan(plan, [profile, profile]), tmp_path / "t.npz")
    with pytest.raises(BadInput, match="expected an aurora profile, found format 'aurora trace'"):
        load_profile(tmp_path / "t.npz")
