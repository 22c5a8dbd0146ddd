"""All subcommands alike: JSON on request and documented, names from the registries, options as the API names them, worst layers."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import typer.main

import aurora as library
from aurora.algorithms.alltoall.registry import ORDER
from aurora.algorithms.gradient_codes import SCHEMES
from aurora.algorithms.placement.grouping import PLACE
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.cli import demo, main, options
from aurora.cli.options import documented, is_further
from aurora.io import save, shipped
from aurora.io.engine_placements import PLACEMENT_FORMATS
from aurora.io.routing_dumps import ROUTING_FORMATS, RecordedRouting, RoutingFormat
from aurora.types import DriftOptions, PlanOptions, ProfileOptions, RequestOptions, RunOptions, SyntheticOptions, TrainOptions
from tests.cli.refusal import refused

DOCS = Path(__file__).parents[2] / "docs"
CONFIG = {"num_local_experts": 4, "num_hidden_layers": 6, "num_experts_per_tok": 1, "hidden_size": 64, "intermediate_size": 64}
DEMO = shipped("clusters/demo-4.toml")
pytestmark = pytest.mark.timeout(600)  # processes start slowly on a busy machine


def commands():
    """Every subcommand by the words that call it."""
    root = typer.main.get_command(main.app)
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {each}", sub) for each, sub in command.commands.items())
        else:
            yield name, command


def documented_keys():
    """By subcommand, the keys that docs/json.md documents."""
    parts = re.split(r"^## aurora (.+)$", (DOCS / "json.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        subcommand.strip(): set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
        for subcommand, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_subcommand_has_json_and_a_section_of_the_page():
    found = dict(commands())
    assert all(any("--json" in param.opts for param in command.params) for command in found.values())
    assert {name.split(" --")[0] for name in documented_keys()} == set(found)


def test_few_options_and_only_registered_placeholders():
    for name, command in commands():
        flags = [param for param in command.params if param.opts[0].startswith("-")]
        assert sum(not is_further(param) for param in flags) <= 13, name  # and --help
        for param in command.params:
            assert set(re.findall(r"\{(\w+)\}", param.help or "")) <= set(options.CHOICES)
            assert not re.search(r"\b(0|None), \w+:", param.help or ""), "users type the word alone"
    for kind in options.CHOICES:
        assert options.names(kind)


@pytest.mark.parametrize(
    ("subcommand", "kind", "missing"),
    [
        ("profile", ProfileOptions, set()),
        ("synthetic", SyntheticOptions, set()),
        ("plan", PlanOptions, set()),
        ("run", RunOptions, {"keep_logits", "predictable"}),  # --verify and --compare set them
        ("simulate", RequestOptions, set()),
        ("evaluate", DriftOptions, set()),
        ("train", TrainOptions, set()),
    ],
)
def test_options_are_parameters_by_the_same_names_and_documented(subcommand, kind, missing):
    params = {param.name: param for param in dict(commands())[subcommand].params}
    names = {field.name for field in fields(kind)}
    assert names - set(params) == missing
    assert set(documented(kind)) == names
    for field in fields(kind):
        if (
            field.name in params
            and field.name
            not in ("workers", "seed", "adapt", "priorities", "weights", "micro_batches", "tokens_per_step", "slots_per_gpu")
            and not params[field.name].required
        ):
            assert params[field.name].default == field.default, field.name


def test_interleave_has_the_same_values_everywhere():
    from aurora.types.run_options import INTERLEAVE

    subcommands = dict(commands())
    for subcommand in ("run", "simulate"):
        (param,) = (param for param in subcommands[subcommand].params if param.name == "interleave")
        assert param.default in INTERLEAVE
    assert inspect.signature(library.simulate).parameters["interleave"].default == RunOptions.interleave


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
    "profile": "MIXTRAL TEXT --sources 2 --prompt-tokens 8 --batch 1 --limit 2 -o q.npz",
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
    "measure compute": "MIXTRAL --prompt-tokens 8 --batch 1 -o c.npz",
}


@pytest.mark.parametrize("subcommand", LINES)
def test_json_is_one_object_of_documented_keys(aurora, made, mixtral, text, monkeypatch, subcommand):
    monkeypatch.chdir(made)
    monkeypatch.setattr(demo, "serve_all", lambda *_: [demo.DemoOutcome(1.0, 1.0)] * len(demo.WAYS))
    monkeypatch.setattr("aurora.cli.report.report_files", lambda *_: None)
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
    assert {name.split(" --")[0] for name in LINES} | elsewhere == {name for name, _ in commands()}


def test_json_of_all_orders(aurora, made):
    assert set(json.loads(aurora("order", made / "m.csv", "--method", "all", "--json")[1])) == {"schema", "schedules"}


def test_tables_show_the_worst_layers_and_all_on_request(aurora, made):
    cases = [
        ["plan", "--cluster", DEMO, "--profile", made / "a.npz", "-o", made / "again.json"],
        ["evaluate", made / "p.json", "--profile", made / "b.npz"],
        ["simulate", made / "p.json"],
        ["evaluate", "--before", made / "a.npz", "--profile", made / "b.npz"],
        ["synthetic", "zipf:1", made / "config.json", "-o", made / "s.npz"],
    ]
    for command in cases:
        short, long = (aurora(*command, *more)[1] for more in ([], ["--layers"]))
        assert "3 worst of 6 layers" in " ".join(short.split())
        assert "worst of" not in long
        assert long.count("│") > short.count("│")


def test_a_new_order_is_one_function_and_one_line(aurora, made, monkeypatch):
    def toy(*args, **more):
        return ORDER["spread-out"](*args, **more)

    monkeypatch.setitem(ORDER, "toy-order", toy)
    for subcommand in ("order", "plan"):
        assert "toy-order" in aurora(subcommand, "--help")[1]
    assert aurora("order", made / "m.csv", "--method", "toy-order")[0] == 0
    plan = ["plan", "--cluster", DEMO, "--profile", made / "a.npz", "-o", made / "toy.json"]
    assert aurora(*plan, "--order", "toy-order")[0] == 0
    assert aurora("simulate", made / "toy.json")[0] == 0
    refused(aurora(*plan, "--order", "best"), "--order: expected one of auto, openshop, .*toy-order, found 'best'")


def test_a_new_placement_is_one_function_and_one_line(aurora, made, monkeypatch):
    monkeypatch.setitem(PLACE, "toy-place", lambda *args: PLACE["contiguous"](*args))
    assert "toy-place" in aurora("plan", "--help")[1]
    plan = ["plan", "--cluster", DEMO, "--profile", made / "a.npz", "-o", made / "toy.json"]
    assert aurora(*plan, "--place", "toy-place")[0] == 0
    refused(aurora(*plan, "--place", "best"), "--place: expected one of auto, .*toy-place.*, found 'best'")


def test_a_new_format_is_one_function_and_one_line(aurora, made, monkeypatch):
    def toy(path, shape, where):
        return RecordedRouting(np.full((1, 6, 4), len(path.read_text())))

    monkeypatch.setitem(ROUTING_FORMATS, "toy-format", RoutingFormat(toy, ".toy"))
    assert "toy-format (.toy)" in " ".join(aurora("import", "--help")[1].replace("│", " ").split())
    (made / "x.toy").write_text("abc")
    given = ["import", made / "x.toy", "--shape", made / "config.json", "-o", made / "toy.npz", "--format"]
    assert aurora(*given, "toy-format")[0] == 0
    refused(aurora(*given, "best"), "--format: expected one of .*toy-format.*, found 'best'")


def test_other_names_come_from_their_registries(aurora, monkeypatch):
    monkeypatch.setitem(PLACEMENT_FORMATS, "toy-engine", PLACEMENT_FORMATS["eplb"])
    monkeypatch.setitem(SCHEMES, "toy-scheme", SCHEMES["bcc"])
    for subcommand, name in (("export", "toy-engine"), ("import", "toy-engine"), ("train", "toy-scheme")):
        assert name in aurora(subcommand, "--help-all")[1]
    assert options.completed("order")("openshop") == ["openshop", "openshop-best"]
    assert options.completed(one_of=("gloo", "nccl"))("n") == ["nccl"]


def test_help_lists_auto_where_it_is_the_default():
    auto = [(name, param) for name, command in commands() for param in command.params if param.default == "auto"]
    assert {"aim", "objective", "place", "time_slice"} <= {param.name for _, param in auto}
    assert [(name, param.name) for name, param in auto if "auto" not in options.filled(param.help)] == []


def test_version_and_completion(aurora):
    code, out, _ = aurora("--version")
    assert (code, out.startswith("aurora 0.")) == (0, True)
    assert "--install-completion" in aurora("--help")[1]


def test_help_says_how_many_more_options_there_are_and_help_all_shows_them(aurora):
    for subcommand in ("plan", "run", "train", "simulate"):
        short, long = (aurora(subcommand, each)[1] for each in ("--help", "--help-all"))
        params = dict(commands())[subcommand].params
        further = {param.opts[0] for param in params if is_further(param)}
        assert short.rstrip().endswith(f"aurora {subcommand} --help-all shows {len(further)} more options.")
        shown, all_shown = (set(re.findall(r"^│ (?:\*  |   )?(--[\w-]+)", page, re.MULTILINE)) for page in (short, long))
        assert shown == {param.opts[0] for param in params if param.opts[0].startswith("--")} - further | {"--help"}
        assert all_shown == shown | further


def test_a_flag_has_one_kind_of_value_and_output_is_what_is_written():
    kinds = {}
    for name, command in commands():
        for param in command.params:
            annotation = str(param.type_descriptor.annotation)
            kind = next((kind for kind in ("Path", "bool", "float", "int") if kind in annotation), "str")
            if param.opts[0].startswith("--"):
                kinds.setdefault(param.opts[0], set()).add(kind)
            assert param.name != "output" or set(param.opts) == {"--output", "-o"}, name
    several = {flag for flag, found in kinds.items() if len(found) > 1}
    assert several == {"--gpus", "--model", "--slots-per-gpu"}, "a number, or names"
