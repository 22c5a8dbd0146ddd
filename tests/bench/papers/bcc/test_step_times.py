"""Recorded times of training steps: what is read, and what is refused."""

import pytest

from aurora.errors import BadInput
from bench.papers.bcc.step_times import load_step_times

pytestmark = pytest.mark.full

HEAD = ",worker,gpu,time,batch_time_norm\n"


def test_steps_are_read_by_worker_in_their_order(tmp_path):
    (tmp_path / "job.csv").write_text(HEAD + "0,1,25,1,476\n1,0,25,1,509\n2,1,25,2,500.5\n")
    found = load_step_times(tmp_path / "job.csv")
    assert {worker: seconds_I.tolist() for worker, seconds_I in found.items()} == {0: [509.0], 1: [476.0, 500.5]}
    assert list(found) == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "expected rows of step times, found none"),
        (HEAD + "0,1,25,1,fast\n", "expected numbers in columns worker and batch_time_norm"),
        (HEAD + "0,1,25,1,-3\n", "batch_time_norm -3"),
        (HEAD + "0,1,25,1,nan\n", "batch_time_norm nan"),
        (HEAD + "0,1\n", "expected numbers in columns"),
        ("a,b\n1,2\n", "expected numbers in columns worker and batch_time_norm: '"),
    ],
)
def test_what_is_refused(tmp_path, text, message):
    (tmp_path / "job.csv").write_text(text)
    with pytest.raises(BadInput, match=message):
        load_step_times(tmp_path / "job.csv")


def test_no_file(tmp_path):
    with pytest.raises(BadInput, match=r"no\.csv: no such file of recorded stragglers"):
        load_step_times(tmp_path / "no.csv")
