"""How `aurora vllm` starts servers: what is refused before loading, options that are added, and command lines of ranks."""

import importlib.util
import io
import json
import os
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from filelock import FileLock

pytest.importorskip("aiohttp", reason="aiohttp comes with vLLM")

from aurora_vllm import serve_command
from aurora_vllm.serve_command import prepare

from aurora.advisor.engines.vllm import rank_words
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.cli import vllm
from aurora.errors import AuroraError
from aurora.io import load_cluster, save
from aurora.planner.plan import make_plan
from aurora.types import PlanOptions, SyntheticOptions

CONFIG = {
    "num_local_experts": 8, "num_hidden_layers": 3, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64,
    "head_dim": 32,
}  # fmt: skip


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Prepares a command with a CPU build of vLLM, whether it is installed here or not."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(serve_command, "find_spec", lambda name: name)
    monkeypatch.setattr(serve_command, "metadata", SimpleNamespace(version=lambda name: "0.32.0+cpu"))
    for name in (
        "VLLM_CPU_KVCACHE_SPACE",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
    ):
        monkeypatch.delenv(name, raising=False)
    said = []

    def made(*words, model=None, cluster=None, apply=False, survive=False):
        found = prepare(model or str(tmp_path / "model"), list(words), cluster, tmp_path / "state", apply, survive, said.append)
        found.lock.release()  # as at its end
        return found, " ".join(said)

    return made


def settings(found):
    return json.loads(value(found.command(0 if 0 in found.ranks else found.ranks[0], 700, "", 600)[0], "--additional-config"))[
        "aurora"
    ]


def value(words, name):
    """What words give an option, which they have once at most; None if they do not."""
    where = [number for number, word in enumerate(words) if word == name]
    assert len(where) <= 1
    return words[where[0] + 1] if where else None


@pytest.mark.parametrize("words", [["--data_parallel_size=4", "-tp", "2"], ["-dp", "4", "--tensor-parallel-size=2"]])
def test_options_are_read_in_all_of_vllms_spellings(command, words):
    found, _ = command(*words)
    assert (found.size, found.tensor) == (4, 2)
    assert value(found.command(1, 700, "", 600)[0], "--tensor-parallel-size") == "2"


def test_every_rank_has_a_server_of_its_own(command):
    found, _ = command("-dp", "2", "--port", "9", "--host", "0.0.0.0", "--max-model-len", "64")
    assert (found.given.host, found.given.port) == ("0.0.0.0", 9)
    for rank in range(2):
        words, environ = found.command(rank, 700 + rank, "", 600)
        assert words[4:6] == ["serve", str(found.model)]
        expected = rank_words([], rank, 2, 700 + rank, ("127.0.0.1", 600))
        assert words[-len(expected) :] == expected
        assert [word for word in words if word == "--port"] == ["--port"]
        assert "64" in words
        assert environ["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_two_cpu_ranks_are_the_default_and_are_said_to_be_no_measurement(command):
    found, said = command()
    assert (found.size, list(found.ranks)) == (2, [0, 1])
    assert "2 cpu at 1e+09 bytes/s, a default, not measured" in said
    for name in ("--enable-expert-parallel", "--enforce-eager", "--dtype"):
        assert name in found.words
    assert "--enable-eplb" not in found.words
    assert settings(found) == {"record": str(found.state / "seen"), "record_every_s": 10.0}


def test_on_gpus_there_is_a_rank_on_each_and_experts_move_through_eplb(command, monkeypatch):
    monkeypatch.setattr(serve_command, "metadata", SimpleNamespace(version=lambda name: "0.33.0"))
    monkeypatch.setattr(serve_command, "find_devices", lambda: SimpleNamespace(cluster=load_cluster("h100-nvlink-8")))
    found, said = command(apply=True)
    assert (found.size, found.tensor, len(load_cluster(found.state / "cluster.toml"))) == (8, 1, 8)
    assert "as datasheets say, not measured" in said
    assert "--enable-eplb" in found.words
    assert not {"--dtype", "--enforce-eager"} & set(found.words)
    assert settings(found)["adapt"]
    local = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert found.command(3, 700, "", 600)[1] == {**local, "CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found, _ = command("-dp", "2", "-tp", "2")
    assert found.command(1, 700, "", 600)[1]["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "--enable-eplb" not in found.words


def test_options_that_are_given_stay(command):
    own = json.dumps({"other": 1, "aurora": {"record": "/tmp/mine", "order": "online"}})
    found, _ = command("-dp", "2", "--dtype", "bfloat16", "--additional-config", own)
    assert value(found.words, "--dtype") == "bfloat16"
    assert settings(found) == {"record": "/tmp/mine", "record_every_s": 10.0, "order": "online"}
    assert found.given.additional_config["other"] == 1


@pytest.mark.parametrize(
    ("words", "variable", "key", "given"),
    [
        (["--api-key", "a", "b"], "c", "a", ["a", "b"]), (["--api_key=a"], None, "a", ["a"]), ([], "c", "c", None),
        (["--api-key", "", "b"], "c", "b", ["", "b"]), ([], "", None, None), ([], None, None, None),
    ],
)  # fmt: skip
def test_the_key_is_the_first_that_vllm_takes(command, monkeypatch, words, variable, key, given):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    found, _ = command("-dp", "2", *words, "--max-model-len", "64")
    assert found.api_key == key
    started, _ = found.command(1, 700, "", 600)
    where = started.index("--api-key") + 1 if given else 0
    assert started[where : where + len(given or ())] == (given or [])
    assert value(started, "--max-model-len") == "64"


def test_a_revision_is_given_to_servers(command):
    found, _ = command("-dp", "2", "--revision", "v2")
    assert (found.given.revision, value(found.command(1, 700, "", 600)[0], "--revision")) == ("v2", "v2")


def test_one_rank_is_a_server_as_vllms_own(command):
    found, _ = command("-tp", "2")
    words, _ = found.command(0, 8000, "", 600)
    assert (found.size, value(words, "--data-parallel-rank")) == (1, None)
    assert (value(words, "--tensor-parallel-size"), value(words, "--port")) == ("2", "8000")


def test_an_allow_list_of_plugins_gets_this_one(command, monkeypatch):
    found, _ = command("-tp", "2")
    for allowed, given in (("lora", "lora,aurora"), ("aurora,lora", None)):
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        assert found.command(0, 8000, "", 600)[1].get("VLLM_PLUGINS") == given


def test_ranks_of_one_of_several_hosts(command, tmp_path):
    found, _ = command("-dp", "4", "-dpl", "2", "-dpr", "2", "-dpa", "10.0.0.1", "-dpp", "77")
    assert list(found.ranks) == [2, 3]
    words, environ = found.command(3, 700, "", 600)
    assert "VLLM_HOST_IP" not in environ
    assert [value(words, f"--data-parallel-{name}") for name in ("rank", "size", "address", "rpc-port")] == [
        "3",
        "4",
        "10.0.0.1",
        "77",
    ]
    assert not {"-dpl", "-dpr", "-dpa"} & set(words)


def test_survival_takes_two_replicas_of_each_expert_and_the_keepers_store(command):
    found, _ = command("-dp", "4", survive=True, apply=True)
    assert value(found.words, "--eplb-config.num_redundant_experts") == "8"
    assert int(value(found.words, "--eplb-config.step_interval")) > 1e9  # else experts of little load have one holder
    own, _ = command("-dp", "4", "--eplb-config", '{"num_redundant_experts": 8}', survive=True)
    assert value(own.words, "--eplb-config.step_interval") is None
    assert {"--enable-eplb", "--enable-fault-tolerance"} <= set(found.words)
    assert "adapt" not in settings(found)  # a controller that drops replicas would end survival
    words, _ = found.command(0, 700, "127.0.0.1:5", 600)
    assert json.loads(value(words, "--additional-config"))["aurora"]["fault_store"] == "127.0.0.1:5"


@pytest.mark.parametrize(
    ("options", "eplb"), [(PlanOptions(slots_per_gpu=4), False), (PlanOptions(place="equal-split", slots_per_gpu=6), True)]
)
def test_the_next_start_serves_by_the_plan(command, options, eplb):
    found, said = command("-dp", "2", apply=True)
    assert "no plan yet" in said
    assert "adapt" not in settings(found)
    profile = draw_profile("zipf:0.8", CONFIG, SyntheticOptions(sources=2))
    (found.state / "recommended").mkdir()
    plan = found.state / "recommended/plan.json"
    cluster = load_cluster(found.state / "cluster.toml")
    cluster = replace(cluster, gpus=tuple(replace(gpu, kind=next(iter(profile.curves))) for gpu in cluster.gpus))
    save(make_plan(cluster, [profile], options), plan)
    again, said = command("-dp", "2", apply=True)
    assert settings(again)["plan"] == str(plan)
    assert ("--enable-eplb" in again.words) is settings(again).get("adapt", False) is eplb  # through which experts follow
    assert "--eplb-config.num_redundant_experts" not in again.words  # the plugin sets what the plan needs
    assert "plan" not in settings(command("-dp", "2")[0])
    assert "plan" not in settings(command("-dp", "2", apply=True, survive=True)[0])  # not two replicas of each


def test_a_tuned_models_folder_is_served_and_not_the_model_that_it_came_from(command, tmp_path):
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps({**CONFIG, "_name_or_path": "org/base"}))
    for given in (tmp_path / "model", config):
        assert command(model=str(given))[0].model == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        (["-dp", "x"], {}, "--data-parallel-size: expected a whole number from 1 to 65535, found 'x'"),
        (["-dp", "0"], {}, "--data-parallel-size: expected a whole number from 1 to 65535, found '0'"),
        (["--port", "65536"], {}, "--port: expected a whole number from 1 to 65535, found '65536'"),
        (["--headless"], {}, "--headless: expected none"),
        (["--additional-config", "[1]"], {}, "--additional-config: expected a JSON object"),
        (["--additional-config", "{"], {}, "--additional-config: expected JSON, found '{'"),
        (["--additional-config", '{"aurora": {"paln": 1}}'], {}, "aurora knows no 'paln'; expected plan"),
        (["-dp", "2", "-dpl", "1"], {"survive": True}, "`survive`: expected several data-parallel ranks, all on this host"),
        (["--additional-config", '{"aurora": {"fault_store": "127.0.0.1:1"}}'], {}, "fault_store: expected --survive"),
        (["-dp", "3"], {"cluster": "demo-4"}, "`cluster`: expected 3 GPUs, one for each rank, found 4"),
        (
            [],
            {"cluster": "h100-nvlink-8"},
            "expected ranks on what this host has, 8 cpu, found 8 NVIDIA H100 80GB HBM3 beyond that",
        ),
        ([], {"model": "nowhere"}, "nowhere: no such file"),
        ([], {"model": "--dtype"}, "`model`: expected the model first"),
        ([], {"model": "qwen3moe-stdlib"}, "expected attention heads of 32 or more"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(command, tmp_path, given, named, message):
    (tmp_path / "state/seen").mkdir(parents=True)
    record = tmp_path / "state/seen/rank-0.npz"  # of the start before
    record.touch()
    with pytest.raises(AuroraError) as refused:
        command(*given, **named)
    assert message in str(refused.value)
    assert record.exists()


def test_a_state_folder_is_that_of_one_command_at_a_time(command, tmp_path):
    (tmp_path / "state/seen").mkdir(parents=True)
    record = tmp_path / "state/seen/rank-0.npz"
    record.touch()
    with (
        FileLock(tmp_path / "state/lock"),
        pytest.raises(AuroraError, match="expected a folder that no other `aurora vllm` uses"),
    ):
        command("-dp", "2")
    assert record.exists()


def test_settings_of_the_environment_are_not_overridden(command, monkeypatch):
    monkeypatch.setenv("AURORA_RECORD_EVERY_S", "3")
    monkeypatch.setenv("AURORA_REQUESTS", "tokens")
    found, _ = command("-dp", "2")
    assert "record_every_s" not in settings(found)
    assert found.by_tokens
    assert not command("-dp", "2", "--additional-config", '{"aurora": {"requests": "stock"}}')[0].by_tokens


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(command):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AuroraError, match="--port: expected a free one on"):
        command("--port", str(taken.getsockname()[1]))


def test_what_is_not_installed_is_said_with_the_command_that_installs_it(command, monkeypatch):
    monkeypatch.setattr(serve_command, "find_spec", lambda name: None)
    with pytest.raises(AuroraError, match=r'vllm is needed: pip install "aurora-moe\[vllm\]"'):
        command("-dp", "2")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; make test-vllm installs it")
def test_no_option_of_ours_is_one_of_vllms():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from aurora.cli.main import app
    from aurora.cli.options import options_of

    theirs = {name for action in make_arg_parser(FlexibleArgumentParser())._actions for name in action.option_strings}
    ours = {name for option in options_of(app["vllm"]) for name in option.names}
    assert not theirs & ours
    assert {"--data-parallel-rank", "--enable-fault-tolerance"} <= theirs


def test_stalls_of_eplb_are_read_from_the_servers_logs(tmp_path):
    """Of the median, and without the one that vLLM makes at the start to measure its memory; 0.00 s tells nothing."""
    assert serve_command.measured_stall(tmp_path) == []
    (tmp_path / "rank-0.log").write_text("Rearranged experts (profile) in 9.00 s.\nINFO Rearranged experts  in 0.00 s.\n")
    assert serve_command.measured_stall(tmp_path) == []
    (tmp_path / "rank-1.log").write_text("INFO Rearranged experts  in 41.80 s.\nRearranged experts  in 43.00 s.\n")
    assert serve_command.measured_stall(tmp_path) == ["--eplb-stall", "41.8"]


def test_a_sentence_that_nobody_reads_stops_nothing(monkeypatch):
    """The reader of the output has ended, as in `aurora vllm MODEL 2>&1 | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as output:
        monkeypatch.setattr(sys, "stderr", output)
        with pytest.raises(BrokenPipeError):
            print("sentence", file=sys.stderr)
        vllm._say("sentence")
