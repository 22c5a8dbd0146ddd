"""What goes wrong while experts follow the traffic in a real vLLM on the CPU: serving goes on, with a line and a metric of each.

`make test-vllm` runs it. Every fault comes through the function that it would come through, in an engine of two ranks.
"""

import hashlib
import re
import signal
import subprocess
from contextlib import contextmanager, suppress

import pytest

from aurora.io import save
from tests.integrations.test_vllm import (  # noqa: F401
    PROMPTS,
    SAVE_METRICS,
    Ranks,
    alone,
    check_same,
    checkpoints,
    eplb,
    nothing_goes_on,
    pytestmark,
    scattered,
)

slow = pytest.mark.slow

FAULTS = """
import os, threading, time
import numpy as np
import aurora_vllm.vllm_internals.expert_moves as moves

def with_faults(follow):
    def follow_with_faults(*args):
        follow(*args)
        import aurora_vllm.eplb_mover as eplb_mover
        from aurora.algorithms.control.controller import Controller
        window, windows, stuck, seen = Controller.window, [], threading.Event(), []
        def faulty(self, load_LE, *others):
            windows.append(0)
            if len(windows) == 2:
                load_LE = np.full(np.shape(load_LE), np.nan)
            if len(windows) == 3:
                load_LE = np.zeros(np.shape(load_LE))
            if len(windows) == 4:
                assert stuck.wait(600)
            return window(self, load_LE, *others)
        Controller.window = faulty
        end_window = eplb_mover.EplbMover._end_window
        def end_window_and_see(self, *given):  # it is found to be late, and two windows later it gets on
            if self.phase is eplb_mover.Phase.LATE and not self._deciding.done():
                seen.append(0)
                if len(seen) == 3:
                    stuck.set()
                    self._deciding.exception(600)
            return end_window(self, *given)
        eplb_mover.EplbMover._end_window = end_window_and_see
    return follow_with_faults

moves.follow_traffic = with_faults(moves.follow_traffic)
"""
STUCK = "no decision within 2 s; vLLM serves on"


@contextmanager
def full_disk(folder):
    """A file system without room for a record."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
    try:
        with (folder / "large").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1024))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@slow
def test_faults_of_the_controller_and_of_the_disk_stop_no_serving(tmp_path, checkpoints, alone):  # noqa: F811
    """Loads that are no numbers, a window without tokens, a controller that is stuck, and a full disk for the records."""
    with full_disk(tmp_path / "full") as full:
        settings = {"adapt": True, "loss": 0.0, "record": str(full), "record_every_s": 1}
        run = Ranks(
            tmp_path / "run", 2, model=str(checkpoints("qwen3moe")), dp=2, repeat=30, additional_config={"aurora": settings},
            llm=eplb(2), before=FAULTS, after=SAVE_METRICS, environ={"MAP": str(tmp_path / "map")},
        )  # fmt: skip
        check_same(run.answers(), alone("qwen3moe"))
    said = run.said()
    for kind in ("no-tokens", "bad-loads"):
        assert said[0].count(f"aurora: keep ({kind})") == 1
    before, _, after = said[0].partition(STUCK)
    assert "aurora: move (gain)" in before
    assert re.search(r"aurora: (keep|move) \((balanced|gain|not-worth)\)", after), "decisions go on"
    shown = [(tmp_path / f"map{rank}.prom").read_text() for rank in range(2)]
    for kind in ("no-tokens", "bad-loads"):
        assert re.search(rf"aurora_control_decisions_total{{.*kind=.{kind}.*}} 1.0", shown[0])
    assert float(re.search(r"aurora_control_failures_total{.*} (.*)", shown[0])[1]) >= 2
    for rank in range(2):
        assert said[rank].count("No space left on device; recording stops") == 1
        assert re.search(r"aurora_record_failures_total{.*} 1.0", shown[rank])


DIES = """
import os, signal
import aurora_vllm.vllm_internals.expert_moves as moves
follow = moves.follow_traffic
def follow_and_die(*args):
    follow(*args)
    import vllm.distributed.eplb.rebalance_execute as execute
    move, layers = execute.move_to_buffer, []
    def move_or_die(**named):
        if named["layer_idx"] == 0:
            layers.clear()
        layers.extend([0] * bool((named["old_indices"] != named["new_indices"]).any()))
        if len(layers) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return move(**named)
    execute.move_to_buffer = move_or_die
moves.follow_traffic = follow_and_die
"""  # rank 1, when some experts have moved and others have not


@slow
def test_a_rank_killed_in_the_middle_of_moves_ends_the_engine_and_leaves_nothing_torn(tmp_path, checkpoints, alone):  # noqa: F811
    """vLLM's data-parallel engines end together. The model's files are as they were, and a restart follows and answers equally."""
    checkpoint = checkpoints("qwen3moe")
    save(scattered(checkpoint, 2, most=4), tmp_path / "plan.json")
    digests = files(checkpoint), files(tmp_path)
    settings = {"adapt": True, "loss": 0.0, "plan": str(tmp_path / "plan.json"), "order": "plan"}
    job = {"model": str(checkpoint), "dp": 2, "additional_config": {"aurora": settings}, "llm": eplb(0)}
    run = Ranks(tmp_path / "dies", 2, before_1=DIES, repeat=300, **job)
    codes = run.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None, -signal.SIGKILL)
    assert "expert-parallel rank 1 is gone" in run.said()[0]
    assert "aurora: move (gain)" in run.said()[0]
    assert (files(checkpoint), {name: digest for name, digest in files(tmp_path).items() if name in digests[1]}) == digests
    again = Ranks(tmp_path / "again", 2, repeat=10, **job)
    check_same(again.answers(), alone("qwen3moe"))
    assert "aurora: move (gain)" in again.said()[0]


def files(folder):
    """The digest of each file in a folder, by name."""
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir() if each.is_file()}
