"""Launch commands of aurora's model of vLLM, read by vLLM's own argument parser and checked by its own configuration."""

import functools
import importlib.util
import shlex
from pathlib import Path
from unittest import mock

import pytest

from aurora.advisor.engines import SERVING_ENGINES
from aurora.advisor.engines.vllm import BACKENDS

MODEL = str(Path(__file__).parent)  # a folder, so that no name is looked up
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; make test-vllm installs it"
)


@functools.cache
def parser_of_serve():
    """The parser of `vllm serve`, and the subcommand."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    return parser, serve


def parsed(way):
    """The arguments of each of a way's commands, as vLLM parses them, and the engine arguments that it makes of them."""
    engine = SERVING_ENGINES[way.engine]
    return parsed_lines(engine.command(way, MODEL, Path("a folder", engine.file)).splitlines())


def parsed_lines(lines):
    """As `parsed`, of command lines."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser, serve = parser_of_serve()
    for line in lines:
        if line.startswith("#"):
            continue
        words = shlex.split(line)
        arguments = parser.parse_args(words[words.index("serve") :])
        serve.validate(arguments)
        assert arguments.model_tag == MODEL
        arguments.model = arguments.model_tag  # as the subcommand does
        yield arguments, AsyncEngineArgs.from_cli_args(arguments)


@pytest.mark.parametrize("name", ["vllm", "vllm-ascend"])
@pytest.mark.parametrize(("gpus", "per_server"), [(4, 8), (16, 8)])
def test_vllm_reads_the_settings_that_the_way_has(name, gpus, per_server):
    from vllm.config import parallel

    for way in SERVING_ENGINES[name].ways(gpus, per_server, 128):
        layout, ranks = way.layout, []
        for arguments, found in parsed(way):
            assert (found.tensor_parallel_size, found.data_parallel_size) == (layout.tensor, layout.data)
            assert found.enable_expert_parallel == (layout.expert > 1)
            backend = BACKENDS[way.exchange] if name == "vllm" and layout.data > 1 else ""
            assert found.all2all_backend == (backend or "allgather_reducescatter")
            assert found.enable_dbo == way.overlap
            assert found.expert_placement_strategy == ("linear" if way.placement == "plan" else way.placement)
            local = found.data_parallel_size_local or layout.data
            ranks += range(found.data_parallel_start_rank or 0, (found.data_parallel_start_rank or 0) + local)
            assert arguments.headless == (found.node_rank > 0 or bool(found.data_parallel_start_rank))
            if name == "vllm":
                assert found.eplb_config.num_redundant_experts == way.redundant
                assert found.enable_eplb >= bool(way.eplb or way.redundant)
            if name == "vllm" and way.eplb:
                assert (found.eplb_config.window_size, found.eplb_config.step_interval) == (way.eplb.window, way.eplb.interval)
            names = "tensor_parallel_size data_parallel_size enable_expert_parallel all2all_backend enable_eplb eplb_config"
            fields = {field: getattr(found, field) for field in [*names.split(), "enable_dbo", "expert_placement_strategy"]}
            with mock.patch.object(parallel, "current_platform"):  # checks of a GPU's settings, where there is none
                config = parallel.ParallelConfig(**fields, distributed_executor_backend="mp")
            assert config.use_all2all == (layout.data > 1)
        assert sorted(ranks) == sorted([*range(layout.data)] * (layout.copies if layout.data > 1 else len(ranks)))


def test_vllm_and_the_plugin_read_the_commands_of_the_gpu_checks():
    from aurora_vllm.settings import read_settings
    from vllm.engine.arg_utils import AsyncEngineArgs

    from bench.gpu.served import WAYS, command

    parser, serve = parser_of_serve()
    for way, (options, settings) in WAYS.items():
        arguments = parser.parse_args(command(MODEL, 8, way, 8000)[1:])
        serve.validate(arguments)
        arguments.model = arguments.model_tag
        found = AsyncEngineArgs.from_cli_args(arguments)
        assert (found.data_parallel_size, found.enable_expert_parallel, found.max_model_len) == (8, True, 512)
        assert found.enable_eplb == ("--enable-eplb" in options)
        assert found.additional_config == ({} if settings is None else {"aurora": settings})
        assert (read_settings(settings, {}) is None) == (settings is None)
