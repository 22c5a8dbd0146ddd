"""Reads launch commands by SGLang's own ServerArgs, and settles them by its own rules, where no CUDA is: run by test_sglang.py.

`python sglang_arguments.py FOLDER` has SGLang's unpacked wheel in FOLDER. Each line of its input is a JSON list of a command's
words; each line of its output the settings that SGLang makes of them, or the error that it raises, as JSON.
"""

import argparse
import importlib.abc
import importlib.machinery
import json
import sys
import types
from typing import ClassVar
from unittest import mock

OF_MODELS = ("deepep_v2", "flashinfer", "mori")  # back ends whose rules load the model's config, and kernels with it


class MissingModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for what SGLang imports and this environment has not."""

    roots: ClassVar = set()

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        root, asks = name.partition(".")[0], frame.f_globals.get("__name__", "").partition(".")[0]
        if root == "sglang" or (asks != "sglang" and root not in self.roots):
            return None
        self.roots.add(root)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        found = mock.MagicMock(name=spec.name)
        found.__path__, found.__spec__, found.__name__ = [], spec, spec.name
        return found

    def exec_module(self, module):
        """Does nothing: the module is there."""


def settings(words, parser, args, rules, view):
    """The settings that SGLang makes of a command's words."""
    raw = args.from_cli_args(parser.parse_args([*words, "--chunked-prefill-size", "8192"]))  # as on a GPU of 80 GB
    for rule in rules:
        if rule.__name__ != "handle_a2a_moe" or raw.moe_a2a_backend not in OF_MODELS:
            rule(raw)
    names = (
        "model_path tp_size pp_size attn_dp_size dp_size ep_size moe_a2a_backend deepep_mode ep_num_redundant_experts init_expert_location "
        "enable_eplb eplb_rebalance_num_iterations expert_distribution_recorder_buffer_size ep_dispatch_algorithm enable_waterfill "
        "enable_two_batch_overlap nnodes node_rank port"
    )
    return {name: getattr(view(raw), name) for name in names.split()}


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    sys.meta_path.append(MissingModules())
    dill = types.ModuleType("dill")  # which torch asks for too
    dill.__spec__ = importlib.machinery.ModuleSpec("dill", None)
    dill.dumps, dill.loads, dill.extend = (lambda *_: b""), (lambda _: None), (lambda **_: None)
    sys.modules.setdefault("dill", dill)
    from sglang.srt.arg_groups import cuda_graph_hook, moe_hook, parallel_hook, validation_hook
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    ruled = (
        parallel_hook.handle_deprecated_dp_attention,
        cuda_graph_hook.parse_cuda_graph_config,
        parallel_hook.handle_data_parallelism,
        moe_hook.handle_a2a_moe,
        parallel_hook.handle_eplb_and_dispatch,
        parallel_hook.handle_expert_distribution_metrics,
        validation_hook.check_two_batch_overlap,
    )

    known = argparse.ArgumentParser()
    ServerArgs.add_cli_args(known)
    for line in sys.stdin:
        try:
            print(json.dumps(settings(json.loads(line), known, ServerArgs, ruled, resolving_view)), flush=True)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
