"""All subcommands alike: JSON on request and documented, names from the registries, options as the API names them."""

import json
import re
from dataclasses import fields
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest

from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.gradient_codes import SCHEMES
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.replicas.failure_resilient import SURVIVE
from aurora.algorithms.replicas.registry import REPLICAS
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.cli import demo
from aurora.cli.main import VERBS, app
from aurora.cli.options import options_of
from aurora.io import save, shipped
from aurora.io.engine_placements import PLACEMENT_FORMATS
from aurora.io.routing_dumps import ROUTING_FORMATS
from aurora.types import PlanOptions, ProfileOptions, RequestOptions, RunOptions, SyntheticOptions, TrainOptions
from tests.cli.refusal import refused

DOCS = Path(__file__).parents[2] / "docs"
CONFIG = {"num_local_experts": 4, "num_hidden_layers": 6, "num_experts_per_tok": 1, "hidden_size": 64, "intermediate_size": 64}
DEMO = shipped("clusters/demo-4.toml")
pytestmark = pytest.mark.timeout(600)  # processes start slowly on a busy machine


def commands():
    """The options and arguments of every subcommand, by the words that call it and by parameter."""
    verbs = {name: options_of(reduce(getitem, name.split(), app)) for name in VERBS}
    return {name: {option.field_info.name: option for option in options} for name, options in verbs.items()}


def documented_keys():
    """By subcommand, the keys that docs/json.md documents."""
    parts = re.split(r"^## aurora (.+)$", (DOCS / "json.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        subcommand.strip(): set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
        for subcommand, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_subcommand_has_json_and_a_section_of_the_page():
    found = commands()
    assert all(options["as_json"].names == ("--json",) for options in found.values())
    assert {name.split(" --")[0] for name in documented_keys()} == set(found)


@pytest.mark.parametrize(
    ("subcommand", "kind", "missing"),
    [
        ("profile", ProfileOptions, {"seed"}),
        ("synthetic", SyntheticOptions, {"correlation", "token_level"}),
        ("plan", PlanOptions, {"colocate", "preemption_s", "seed"}),  # which plans record
        ("run", RunOptions, {"dtype", "keep_logits", "predictable"}),  # --verify and --compare set the first two
        ("simulate", RequestOptions, {"seed"}),
        ("train", TrainOptions, {"weight_decay", "max_norm", "seed"}),
    ],
)
def test_options_are_fields_by_the_same_names_with_their_help_and_defaults(subcommand, kind, missing):
    found = app[subcommand].assemble_argument_collection(parse_docstring=True)
    options = {option.field_info.name: option for option in found if option.parse}
    assert {field.name for field in fields(kind)} - set(options) == missing
    for field in fields(kind):
        if field.name in options:
            assert " ".join(options[field.name].parameter.help.split()) in " ".join(kind.__doc__.split())
            assert options[field.name].field_info.default == field.default


def test_names_come_from_their_registries():
    found = commands()
    plan = {name: set(option.get_choices() or ()) for name, option in found["plan"].items()}
    assert plan["order"] == {"auto", *ORDER}
    assert plan["place"] == {"auto", "swap-search", *PLACE, *REPLICAS, *SURVIVE}
    assert found["order"]["method"].get_choices() == (*ORDER, "auto", "all")
    assert found["place"]["method"].get_choices() == (*REPLICAS, *SURVIVE)
    assert found["train"]["scheme"].get_choices() == tuple(SCHEMES)
    assert found["export"]["form"].get_choices() == tuple(PLACEMENT_FORMATS)
    assert found["import"]["form"].get_choices() == (*PLACEMENT_FORMATS, *ROUTING_FORMATS, "vllm-record")


@pytest.fixture
def made(aurora, tmp_path):
    """Two profiles of one model, a plan of the first, loads and a routing dump."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for seed, name in enumerate(("a.npz", "b.npz")):
        save(draw_profile("zipf:1", CONFIG, SyntheticOptions(window_tokens=50, seed=seed)), tmp_path / name)
    assert aurora("plan", "--cluster", DEMO, "--profile", tmp_path / "a.npz", "-o", tmp_path / "p.json")[0] == 0
    (tmp_path / "loads.csv").write_text("6,5,1,1\n")
    (tmp_path / "m.csv").write_text("0,4\n5,0\n")
    np.save(tmp_path / "loads.npy", np.ones((6, 4), dtype=np.int64))
    return tmp_path


LINES = {
    "synthetic": "zipf:1 config.json -o s.npz",
    "profile": "MIXTRAL --text TEXT --sources 2 --prompt-tokens 8 --batch 1 --limit 2 -o q.npz",
    "record": "http://127.0.0.1:1 -o v.npz",
    "import": "loads.npy --format eplb-load --shape config.json -o i.npz",
    "recommend": "--gpus l40s:4 --model mixtral-topics --engine sglang -o r",
    "plan": "--cluster demo-4 --profile b.npz --explain -o n.json",
    "evaluate": "p.json --profile b.npz",
    "evaluate --before": "a.npz --profile b.npz",
    "simulate": "p.json",
    "train": "MIXTRAL --text TEXT --steps 2 --ranks 2 --batch 2 --length 16 --transport memory -o trained",
    "report": "p.json",
    "order": "m.csv",
    "place": "loads.csv --gpus 2 --slots 2",
    "export": "p.json --format eplb",
    "demo": "-o d",
    "doctor": "",
    "measure compute": "MIXTRAL --batch 1 -o c.npz",
}


@pytest.mark.parametrize("subcommand", LINES)
def test_json_is_one_object_of_documented_keys(aurora, made, mixtral, text, monkeypatch, subcommand):
    monkeypatch.chdir(made)
    told = {"trace": "t.npz", "comparison": {"predicted_s": 1.0, "measured_s": 2.0}}
    monkeypatch.setattr(demo, "_run", lambda *_: told)
    monkeypatch.setattr("aurora.profiler.doctor.examine", lambda _: [])
    monkeypatch.setattr("aurora.profiler.import_routing.profile_vllm_server", lambda *_: draw_profile("zipf:1", CONFIG))
    line = LINES[subcommand].replace("MIXTRAL", str(mixtral)).replace("TEXT", str(text))
    code, out, err = aurora(*subcommand.split(), *line.split(), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert set(found) == documented_keys()[subcommand]
    assert found["schema"] == 1


def test_json_of_every_subcommand_is_tested():
    elsewhere = {"run", "vllm", "measure links", "measure devices"}  # with their results
    assert {name.split(" --")[0] for name in LINES} | elsewhere == set(VERBS)


def test_json_of_all_orders(aurora, made):
    assert set(json.loads(aurora("order", made / "m.csv", "--method", "all", "--json")[1])) == {"schema", "schedules"}


def test_version_completion_and_help(aurora):
    code, out, _ = aurora("--version")
    assert (code, out.startswith("aurora 0.")) == (0, True)
    code, out, _ = aurora("--help")
    assert code == 0
    assert "--install-completion" in out
    assert [name for name in VERBS if name.split()[0] not in out] == []
    assert "Ctrl-C ends the counting" in aurora("profile", "--help")[1]
    assert [aurora(*words)[0] for words in ((), ("measure",))] == [2, 2]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("plans", "expected a subcommand such as plan, .*found 'plans'; see aurora --help"),
        ("order m.csv --methods all", "Unknown option: --methods.*see aurora order --help"),
        ("order m.csv --method best", "--method: expected one of openshop, .*all, found 'best'"),
        ("order m.csv --layer 1.5", "--layer: expected a whole number, found '1.5'"),
        ("order m.csv --layer", "--layer: expected a value, found none"),
        ("order", "TRAFFIC: expected a value, found none"),
        ("order m.csv --json=maybe", "--json: expected another value, found 'maybe'"),
        (
            "plan --cluster demo-4 --profile a.npz --slots-per-gpu few",
            "--slots-per-gpu: expected auto, memory or a whole number",
        ),
        (
            "plan --cluster demo-4 --profile a.npz --tokens-per-step 4:x",
            "--tokens-per-step: expected whole numbers as N or LO:HI",
        ),
        ("simulate p.json --rate 10", "expected --isl and --osl too, to draw requests, or --requests, a trace of them"),
    ],
)
def test_a_wrong_line_is_one_sentence(aurora, line, says):
    refused(aurora(*line.split()), says)


@pytest.mark.parametrize("columns", ["0", "80", "400"])
def test_any_width_of_a_terminal_shows_what_there_is(aurora, made, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert "makespan" in aurora("order", made / "m.csv")[1]


def test_tables_show_the_worst_layers(aurora, made):
    cases = [
        ["plan", "--cluster", DEMO, "--profile", made / "a.npz", "-o", made / "again.json"],
        ["evaluate", made / "p.json", "--profile", made / "b.npz"],
        ["simulate", made / "p.json"],
        ["evaluate", "--before", made / "a.npz", "--profile", made / "b.npz"],
        ["synthetic", "zipf:1", made / "config.json", "-o", made / "s.npz"],
    ]
    for command in cases:
        assert "3 worst of 6 layers" in " ".join(aurora(*command)[1].split())
