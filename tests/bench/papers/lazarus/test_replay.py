"""python -m bench.papers.lazarus.replay: what it prints and refuses."""

import pytest

from bench.papers.lazarus.replay import main
from tests.bench.papers.test_command import refusal

pytestmark = pytest.mark.full


def test_nodes_come_and_go(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("time_ms,event,node\n" + "".join(f"0,add,n{i}\n" for i in range(4)) + "60000,remove,n1\n")
    main([str(tmp_path / "t.csv"), "--nodes", "4", "--minutes", "5"])
    out = capsys.readouterr().out
    for text in ("GPT-S", "GPT-L", "DS(FT)", "Tutel", "aurora", "restart"):
        assert text in out


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ("a,b\n", [], "expected the columns time_ms,event,node, found a,b"),
        ("", [], "expected the columns time_ms,event,node, found nothing"),
        ("time_ms,event,node\nx,add,a\n", [], "line 2: expected milliseconds"),
        ("time_ms,event,node\n0,remove,a\n", [], "'remove' of 'a', which is absent"),
        ("time_ms,event,node\n0,add,a\n", ["--minutes", 0], "--minutes: expected more than zero"),
        ("time_ms,event,node\n0,add,a\n", ["--nodes", 0], "--nodes: expected from one"),
    ],
)
def test_traces_of_nodes_that_are_refused(tmp_path, capsys, text, args, message):
    (tmp_path / "t.csv").write_text(text)
    assert message in refusal(main, capsys, tmp_path / "t.csv", *args)
