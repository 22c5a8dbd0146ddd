"""API checks of a package that is not installed, from its sources, against the same checks of what is imported."""

import io
import json
import re
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from aurora_vllm.vllm_internals import api_checks
from aurora_vllm.vllm_internals.api_checks import ApiCheck, groups, needed

from tests.integrations import vllm_versions
from tests.integrations.vllm_versions import RUNNERS, Sources, all_checks

pytestmark = pytest.mark.full

FILES = {
    "vllm/__init__.py": "from vllm.parts import Part",
    "vllm/parts/__init__.py": """
        from typing import TYPE_CHECKING
        from .base import Base as Root, make
        from . import base
        from vllm.parts.more import *
        if TYPE_CHECKING:
            current: "Part"
        try:
            import json
        except ImportError:
            json = None
        class Part(Root):
            def run(self, first, /, second, *, third=None, **rest): ...
            @property
            def size(self):
                return self._size + len(self.held)
        POLICIES: dict[str, type] = {"part": Part}
        part = Part("", "")
    """,
    "vllm/parts/base.py": """
        import enum
        from dataclasses import dataclass
        class Base:
            def __init__(self, name, group): ...
            @classmethod
            def register(cls, name): ...
        class Mode(enum.Enum):
            ON = 1
        @dataclass
        class Config:
            model: str
            ranks: int = 1
        def make(name): ...
        async def ask(question): ...
    """,
    "vllm/parts/more.py": """
        def further(a, b):
            return a.run
        def serve(part, executor):
            make("part")
            part.run(1, 2)
            executor.collective_rpc("ask")
            return part.register
    """,
}
PLACES = [
    ("vllm.parts:Part.run", ("first", "second", "third")),
    ("vllm.parts:Part.__init__", ("name", "group")),
    ("vllm.parts:Part.register", ("name",)),
    ("vllm.parts:Part.size", ("_size", "held")),
    ("vllm.parts:Part", ("group",)),
    ("vllm.parts:Root.register", ()),
    ("vllm.parts:base.Mode.__init__", ()),
    ("vllm.parts:base.ask", ("question",)),
    ("vllm.parts:base.Config", ("model", "ranks")),
    ("vllm.parts:make", ("name",)),
    ("vllm.parts:further", ("a", "b")),
    ("vllm.parts:POLICIES.get", ()),
    ("vllm.parts:part.run", ("second",)),
    ("vllm.parts:json.dumps", ("obj",)),
    ("vllm.parts.base:Mode", ()),
    ("vllm:Part.run", ("second",)),
]
LACKS = [
    ("vllm.parts:Part.run", ("fourth",)),
    ("vllm.parts:Part.size", ("missing",)),
    ("vllm.parts:Part.walk", ()),
    ("vllm.parts:base.Config", ("model", "speed")),
    ("vllm.parts:nothing", ()),
    ("vllm.none:Part", ()),
    ("vllm.parts:further", ("c",)),
    ("vllm.parts:json.shout", ()),
]


@pytest.fixture(scope="module")
def wheel():
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in FILES.items():
            archive.writestr(path, textwrap.dedent(text))
    return made.getvalue()


@pytest.fixture
def imported(wheel, tmp_path, monkeypatch):
    """The same package, in the place of vLLM."""
    zipfile.ZipFile(io.BytesIO(wheel)).extractall(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_sources_and_imports_lack_the_same(wheel, imported):
    read = zipfile.ZipFile(io.BytesIO(wheel))
    sources = Sources(lambda path: read.read(path).decode() if path in read.namelist() else None)
    for where, needs in PLACES:
        check = ApiCheck("a test", where, needs)
        assert check.missing() is None, where
        assert sources.missing(check) is None, where
    for where, needs in LACKS:
        check = ApiCheck("a test", where, needs)
        assert sources.missing(check) == check.missing() is not None, where
    assert sources.find("vllm.parts:current.run") is not None, "which is known to type checkers, and made when it is asked for"


def test_the_page_shows_what_was_recorded():
    """The matrix on the page is made of the record and of the tests' marks; `make vllm-versions` writes both."""
    record, page = json.loads(vllm_versions.RECORD.read_text()), vllm_versions.PAGE.read_text()
    assert vllm_versions.on_page(page, record) == page
    run = vllm_versions.cells_run()
    assert run == dict.fromkeys(((runner, feature) for runner in ("V1", "V2") for feature in vllm_versions.NEEDED), True)
    assert vllm_versions.table(record).count("run in CI") == len(vllm_versions.NEEDED), "of both runners in one row"


def test_a_version_that_lacks_something_says_so_in_the_cells_that_need_it(wheel):
    """A wheel without vLLM's modules lacks all; a check that only EPLB makes is lacking in its cells alone."""
    found = vllm_versions.check_version(Sources(lambda _path: None))
    assert all(lack.startswith("loading: there is no ") for cells in found["cells"].values() for lack in cells.values())

    class AllBut(Sources):
        def missing(self, check):
            return f"{check.what}: gone" if check in needed("EPLB-of-V2", "rounds") else None

    found = vllm_versions.check_version(AllBut(lambda _path: None))
    assert {cell for cell, lack in found["cells"]["V2"].items() if lack} == {"EPLB", "adapt"}
    assert not any(found["cells"]["V1"].values())
    assert found["also"] == ["moves in rounds: gone"]
    version = {"version": "9.0", "published": "2030-01-01", "fetched_MB": 1.0, **found}
    shown = vllm_versions.table({"checked": "today", "places": 1, "versions": [version]})
    assert (
        "| 9.0 | 2030-01-01 | V2 | checked | checked | placement by EPLB: gone | placement by EPLB: gone | checked |" in shown
    )


def test_every_check_of_the_plugin_is_made():
    checks = all_checks()
    assert set(needed("workers")) <= set(checks)
    assert {"loading", "checking settings", "naming a lost rank"} <= {check.what for check in checks}
    assert len(set(checks)) == len(checks)


def test_every_group_that_the_plugin_asks_for_is_in_the_table():
    folder = Path(api_checks.__file__).parent
    calls = [call for path in folder.glob("*.py") for call in re.findall(r"(?:check_api|lacks|needed)\((.*)", path.read_text())]
    asked = {
        name.replace("{runner}", runner) for call in calls for name in re.findall(r'"([^"]+)"', call) for runner in RUNNERS
    }
    assert asked == set(groups()) - {"settings"}, "which shows in the table of versions alone"
