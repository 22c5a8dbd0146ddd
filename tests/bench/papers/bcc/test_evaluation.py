"""BCC's evaluation: what its clock and its processes must agree on."""

import json

import numpy as np
import pytest

from aurora.errors import BadInput
from bench.papers.bcc.delays import DELAYS, NETWORK_S, recorded_steps
from bench.papers.bcc.descent import Descent, batch_of, gradient, loss, start
from bench.papers.bcc.evaluation import reduction, reproduce
from bench.papers.bcc.studies import BccOptions, performed, simulated, thresholds
from bench.papers.bcc.text import CLAIMS, as_json, as_markdown

pytestmark = pytest.mark.full


@pytest.fixture
def recorded(tmp_path):
    """Ten workers a job, the odd ones slow in every step."""
    folder = tmp_path / "straggler_pai"
    folder.mkdir()
    for job in (1, 3):
        rows = [f"{i},{i % 10},25,{i // 10},{400 + 400 * (i % 2) + i // 10}" for i in range(200)]
        (folder / f"job_{job}_norm.csv").write_text(",worker,gpu,time,batch_time_norm\n" + "\n".join(rows) + "\n")
    return tmp_path


def test_gradients_are_the_losses_slope():
    descent = Descent(features=6, points=20, seed=0)
    model_F = np.random.default_rng(0).standard_normal(6)
    whole_F = sum(gradient(*batch_of(descent, b), model_F) for b in range(3)) / 60
    for f in range(6):
        step_F = np.zeros(6)
        step_F[f] = 1e-6
        slope = (loss(descent, 3, model_F + step_F) - loss(descent, 3, model_F - step_F)) / 2e-6
        assert whole_F[f] == pytest.approx(slope, abs=1e-6)


def test_nesterovs_first_step_is_plain_descent_and_losses_fall():
    descent = Descent(features=40, points=10, seed=1)
    state, losses = start(40), []
    for _ in range(30):
        losses.append(loss(descent, 4, state.model_F))
        state = state.after(sum(descent(b, {"model": state.ahead_F}) for b in range(4)), 40)
    assert losses[0] == pytest.approx(np.log(2))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("workers", [50, 100])
def test_the_claims_by_the_clock(workers, tmp_path):
    timings = simulated("as in the tables", workers, 10, 20, 0, tmp_path)
    waits = {timing.scheme: timing.waited for timing in timings}
    assert waits["uncoded"] == workers
    assert waits["cyclic"] == workers - 9
    assert waits["bcc"] == pytest.approx({50: 11.4, 100: 29.3}[workers], rel=0.1)
    assert waits["balanced"] < waits["bcc"]
    for over, claim in zip(("uncoded", "cyclic"), CLAIMS[workers], strict=True):
        assert reduction(timings, "balanced", over) >= claim
        assert reduction(timings, "bcc", over) >= claim - 0.05
    assert simulated("as in the tables", workers, 10, 20, 0, tmp_path) == timings


def test_processes_give_the_serial_gradient_under_every_scheme(tmp_path):
    options = BccOptions((4,), load=2, process_iterations=2, stretch=1.0, points=4, features=50)
    timings = performed(["as in the tables"], 4, options, tmp_path, lambda: None)["as in the tables"]
    assert [timing.scheme for timing in timings] == ["uncoded", "cyclic", "bcc", "balanced"]
    assert all(timing.error < 1e-9 for timing in timings)
    assert {timing.scheme: timing.waited for timing in timings}["cyclic"] == 3
    assert len({round(timing.losses[1], 9) for timing in timings}) == 1


def test_recorded_stragglers_persist_unless_shuffled(recorded):
    rng = np.random.default_rng(0)
    steps_IW = recorded_steps(30, 20, rng, recorded)
    slow_W = steps_IW.mean(axis=0) > 1
    assert slow_W.sum() == 10
    assert (steps_IW[:, slow_W].min(axis=0) > steps_IW[:, ~slow_W].max()).all()
    for name in ("recorded", "recorded, shuffled"):
        times = DELAYS[name](30, 20, 2, np.random.default_rng(1), recorded)
        delay_IW = times.message_IW - times.compute_IW
        assert delay_IW.mean() == pytest.approx(NETWORK_S)
        assert (delay_IW.mean(axis=0).std() > 0.2 * NETWORK_S) == (name == "recorded")
    with pytest.raises(BadInput, match="no such file of recorded stragglers"):
        recorded_steps(3, 3, rng, recorded / "nowhere")


def test_thresholds_keep_their_order():
    by_load = {}
    for one in thresholds(30, [2, 5, 10]):
        by_load.setdefault(one.load, {})[one.scheme] = one
    for load, found in by_load.items():
        assert 30 / load <= found["balanced"].exact <= found["bcc"].exact <= found["random"].exact
        assert found["cyclic"].exact == 30 - load + 1
        assert found["balanced"].impossible == 0


def test_the_page(recorded):
    options = BccOptions((12,), load=4, iterations=8, process_iterations=0, draws=5)
    found = reproduce(options, recorded, lambda *_: None)
    page = as_markdown(found, ["x.svg"])
    assert "| 12 | recorded, shuffled | balanced less than cyclic | - |" in page
    assert found.mixed.recommended_s <= found.mixed.even_s
    assert found.mixed.saved == pytest.approx(0.28, abs=0.01)
    kept = json.loads(json.dumps(as_json(found)))
    assert kept["clock"]["12"]["recorded"][0]["scheme"] == "uncoded"
    persistent = next(one for one in found.adapted if one.stragglers == "persistent" and one.work == "is all delay")
    assert persistent.chosen > 1
    assert persistent.chosen_s <= persistent.random_s + 1e-9


def test_options():
    with pytest.raises(BadInput, match="`workers`: expected at least `load` 10 workers, found 5"):
        BccOptions((5,))
    with pytest.raises(BadInput, match="`process_iterations`: expected zero or more, found -1"):
        BccOptions(process_iterations=-1)
