"""Ctrl-C at any time: exit code 130, one sentence at most, no traceback."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import aurora

LARGE = {
    "num_hidden_layers": 58, "num_local_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168, "vocab_size": 129280,
    "moe_intermediate_size": 2048, "intermediate_size": 2048, "num_attention_heads": 128, "num_key_value_heads": 8,
}  # fmt: skip

HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also where a shell in the background ignores it

pytestmark = pytest.mark.full


def test_ctrl_c_while_the_command_is_imported_and_while_it_works(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    for moment, wait_s in (("import", 0.3), ("work", 4.0)):
        words = [
            "recommend",
            "--gpus",
            "h100:64",
            "--engine",
            "vllm",
            "--model",
            tmp_path / "config.json",
            "-o",
            tmp_path / moment,
        ]
        code = f"{HEARD}import aurora.__main__ as main; print('here', flush=True); main.main()"
        command = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert command.stdout.readline() == "here\n"
        time.sleep(wait_s)
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=600)
        assert (command.returncode, err) == (130, "aurora: interrupted\n")
        assert not (tmp_path / moment).exists()


def test_ctrl_c_while_ranks_start(mixtral, tmp_path):
    """It reaches the whole process group: ranks, and the process that they are forked from, leave it to the command."""
    plan = aurora.plan(aurora.load("demo-4"), aurora.synthetic_profile("zipf:1", mixtral))
    aurora.save(plan, tmp_path / "plan.json")
    (tmp_path / "prompts.txt").write_text("import os\n" * 2000)  # so many that no rank is done before
    words = ["run", "plan.json", "--model", mixtral, "--prompts", "prompts.txt", "--max-new-tokens", "200", "-o", "answers"]
    for wait_s in (0.5, 1.0, 2.0):
        command = subprocess.Popen(
            [sys.executable, "-c", f"{HEARD}import aurora.__main__ as main; main.main()", *map(str, words)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        time.sleep(wait_s)
        os.killpg(command.pid, signal.SIGINT)
        _, err = command.communicate(timeout=600)
        assert (command.returncode, err) == (130, "aurora: interrupted\n")
        assert not (tmp_path / "answers").exists()
