"""API checks of versions of vLLM that are not installed, from their source distributions."""

import io
import json
import re
import tarfile
from pathlib import Path

import pytest
from aurora_vllm.vllm_internals import api_checks
from aurora_vllm.vllm_internals.api_checks import groups, needed

from tests.integrations import vllm_versions
from tests.integrations.vllm_versions import RUNNERS, all_checks

pytestmark = pytest.mark.full


def test_a_source_distribution_is_imported_in_place_of_the_installed_vllm():
    """Of one that has two models alone, where the installed vLLM has all: each check says what it lacks, each model what it has."""
    files = {
        "__init__": "",
        "model_executor/__init__": "",
        "model_executor/models/__init__": "",
        "model_executor/models/gpt_oss": """
class RoutedExperts: ...
class GptOssRoutedExperts(RoutedExperts): ...
class OtherExperts: ...
class MegaExperts:
    def choose(self): return self.capture_fn
class GptOssForCausalLM: ...
""",
        "model_executor/models/mixtral": """
import torchvision
class MixtureOfExperts: ...
class MixtralForCausalLM(MixtureOfExperts): ...
""",
    }
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for path, text in {**{f"vllm/{path}": text for path, text in files.items()}, "setup": "raise RuntimeError"}.items():
            member = tarfile.TarInfo(f"vllm-9.0/{path}.py")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    found, models = vllm_versions.check_archive(made.getvalue())
    assert all(lack.startswith("loading: there is no ") for cells in found["cells"].values() for lack in cells.values())
    assert [each for each in models if each["there"]] == [
        {"model": "GPT-OSS", "there": True, "eplb": False, "own": ["GptOssRoutedExperts", "MegaExperts"]},
        {"model": "Mixtral", "there": True, "eplb": True, "own": []},
    ]


def test_the_page_shows_what_was_recorded():
    """The matrix on the page is made of the record and of the tests' marks; `make vllm-versions` writes both."""
    record, page = json.loads(vllm_versions.RECORD.read_text()), vllm_versions.PAGE.read_text()
    assert vllm_versions.on_page(page, record) == page
    run = vllm_versions.cells_run()
    assert run == dict.fromkeys(((runner, feature) for runner in ("V1", "V2") for feature in vllm_versions.NEEDED), True)
    assert vllm_versions.table(record).count("run in CI") == len(vllm_versions.NEEDED), "of both runners in one row"


def test_a_version_that_lacks_something_says_so_in_the_cells_that_need_it():
    """A check that only EPLB makes is lacking in its cells alone."""
    gone = needed("EPLB-of-V2", "balancer")
    found = vllm_versions.check_version(lambda check: f"{check.what}: gone" if check in gone else None)
    assert {cell for cell, lack in found["cells"]["V2"].items() if lack} == {"EPLB", "adapt"}
    assert not any(found["cells"]["V1"].values())
    assert found["also"] == ["naming a stuck balancer: gone"]
    version = {"version": "9.0", "published": "2030-01-01", **found}
    shown = vllm_versions.table({"checked": "today", "places": 1, "installed": "8.0", "versions": [version]})
    assert (
        "| 9.0 | 2030-01-01 | V2 | checked | checked | placement by EPLB: gone | placement by EPLB: gone | checked |" in shown
    )


def test_every_check_of_the_plugin_is_made():
    checks = all_checks()
    assert set(needed("workers")) <= set(checks)
    assert {"loading", "checking settings", "naming a lost rank"} <= {check.what for check in checks}
    assert len(set(checks)) == len(checks)


def test_every_group_of_the_table_is_asked_for_by_the_plugin():
    folder = Path(api_checks.__file__).parent
    texts = [text for path in folder.glob("*.py") for text in re.findall(r'"([^"\n]+)"', path.read_text())]
    asked = {text.replace("{a.runner}", runner) for text in texts for runner in RUNNERS}
    assert set(groups()) - {"settings"} <= asked, "which shows in the table of versions alone"
