"""What is compiled is what is written."""

import pytest

import hatch_build


@pytest.mark.parametrize("core", hatch_build.cores(), ids=lambda core: core.stem)
def test_the_extension_is_that_of_the_source(core):
    assert hatch_build.is_built(core), "python hatch_build.py builds it"


def test_a_change_of_a_source_asks_for_another_extension(tmp_path, monkeypatch):
    monkeypatch.setattr(hatch_build, "ROOT", tmp_path)
    (core := tmp_path / "aurora" / "sum_core.py").parent.mkdir()
    core.write_text("import cython\n")
    assert hatch_build.cores() == [core]
    assert not hatch_build.is_built(core)
    hatch_build.extension_of(core).write_bytes(b"code " + hatch_build.stamp(core) + b" code")
    assert hatch_build.is_built(core)
    core.write_text("import cython  # changed\n")
    assert not hatch_build.is_built(core)
