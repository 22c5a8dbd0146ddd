"""Every reader on files that are damaged, of another kind or hostile: a good read or one sentence that names the file.

600 inputs and more: texts that lose bytes, get others and are cut; values of other types at every place of JSON, YAML, TOML and headers,
nested as deep as a file can be; archives that lose members, and whose arrays have other types and shapes; named pipes, loops of links,
byte order marks, bombs, huge numbers and keys that come twice. Values whose types are known are refused if they have others.
"""

import io
import json
import os
import re
import shutil
import signal
import tomllib
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import aurora
from aurora.algorithms.workload.synthetic import draw_profile
from aurora.errors import AuroraError, BadInput
from aurora.io import files, load_gpus, load_loads, load_matrix, load_model_config, load_requests, read_text, save
from aurora.io.clusters import load_cluster
from aurora.io.engine_placements import PLACEMENT_FORMATS, export_placement, import_placement
from aurora.io.files import shipped
from aurora.io.plans import _digest, load_placement, save_placement
from aurora.io.plugin_records import EngineRecord, load_record, save_record
from aurora.io.prompts import check_corpus, load_arriving, load_token_ids
from aurora.profiler.import_routing import file_digest, import_profile
from aurora.simulator.interpreter import simulate_plan
from aurora.training.training_run import logged_steps
from aurora.types import ComputeCurves, Placement, PlanOptions, SyntheticOptions

CONFIG = {
    "num_local_experts": 4, "num_hidden_layers": 2, "num_experts_per_tok": 2, "hidden_size": 8, "intermediate_size": 8,
}  # fmt: skip
LOADS = np.array([[10, 1, 5, 4], [2, 8, 7, 3]])
PLACEMENT = Placement.evenly((((0, 1), (2, 3)), ((0, 3), (1, 2))))
REPLICATED = Placement((((0, 1), (0, 2)),), (((0.5, 1.0), (0.5, 1.0)),))
RANK_CSV = "expert_distribution_rank0_timestamp1.csv"


def written_routing(folder):
    """A file of each format of recorded routing."""
    torch.save({"rank": 0, "logical_count": torch.tensor(LOADS)[None]}, folder / "stat.pt")
    passes = {"forward_pass_id": 3, "rank": 0, "global_physical_count": torch.tensor(LOADS)}
    torch.save({"records": [passes], "last_physical_to_logical_map": torch.arange(4).repeat(2, 1)}, folder / "passes.pt")
    save_file({f"1_{layer}": LOADS[layer] for layer in range(2)}, folder / "rank0.safetensors")
    record = {"record_type": "eplb_load_stats", "expert_load": LOADS.tolist(), "p2l_map": [[0, 1, 2, 3]] * 2}
    (folder / "vllm.jsonl").write_text(json.dumps(record) + "\n")
    np.save(folder / "loads.npy", LOADS)
    np.savez(folder / "tokens.npz", experts=np.array([[[0, 1], [2, 3]]] * 3), seq_len=np.array([1, 2]))
    rows = "".join(f"{layer},{expert},{LOADS[layer, expert]}\n" for layer in range(2) for expert in range(4))
    (folder / "counts.csv").write_text(f"layer,expert,count\n{rows}")
    (folder / RANK_CSV).write_text(f"layer_id,expert_id,count\n{rows}")
    forms = {
        "stat.pt": "sglang-recorder", "passes.pt": "sglang-recorder", "rank0.safetensors": "trtllm-statistics", "vllm.jsonl": "vllm",
        "loads.npy": "eplb-load", "tokens.npz": "tokens", "counts.csv": "csv", RANK_CSV: "sglang-csv",
    }  # fmt: skip
    return {name: lambda path, form=form: import_profile([path], form, CONFIG) for name, form in forms.items()}


def engine_record():
    ones, sizes = np.ones(3), (8, 8, 8, 8)
    fit = np.ones((3, 3, 3)), np.ones((3, 3)), ones.astype(np.int64)
    return EngineRecord(
        "m", "f", "e", "k", "d", 0, 1, 2, *sizes, (), 1, np.array([0]), LOADS[None], np.ones((2, 5)), fit[2][:2], *fit
    )


def written(folder):
    """A good file for every reader, by name, and what reads it."""
    readers = written_routing(folder)
    profile = draw_profile("zipf:1", CONFIG, SyntheticOptions(sources=4, window_tokens=16, token_level=True))
    plan = aurora.plan(aurora.load("demo-4"), profile, PlanOptions(slots_per_gpu=2))
    save(profile, folder / "profile.npz")
    save(plan, folder / "plan.json")
    save(simulate_plan(plan, [profile]), folder / "trace.npz")
    save(ComputeCurves("m", "f", 2, 16, 10, kinds=profile.curves), folder / "curves.npz")
    readers |= dict.fromkeys(("profile.npz", "plan.json", "trace.npz", "curves.npz"), aurora.load)
    save_record(engine_record(), folder)
    for name, read in (("clusters/leaf-spine-16.toml", load_cluster), ("gpus.toml", load_gpus)):
        readers[Path(shutil.copy(shipped(name), folder)).name] = read
    for form in PLACEMENT_FORMATS:
        suffix = ".yaml" if form == "trtllm" else ".jsonl" if form == "vllm-map" else ".json"
        (folder / f"{form}{suffix}").write_text(export_placement(PLACEMENT, form).text)
        readers[f"{form}{suffix}"] = partial(import_placement, form=form, gpus=2)
    save_placement(REPLICATED, "given", folder / "placement.json")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "matrix.csv").write_text("0,4\n5,0\n")
    (folder / "loads.csv").write_text("6,5.5,1,1\n")
    (folder / "requests.csv").write_text("arrival_s,input_tokens,output_tokens\n0,5,6\n1.5,7,8\n")
    (folder / "requests.jsonl").write_text('{"timestamp": 5, "input_length": 2, "output_length": 3}\n' * 2)
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "at_s": 1.5}\n{"prompt": "b"}\n')
    (folder / "corpus.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"tokens": [1, 2]}\n')
    (folder / "log.jsonl").write_text('{"step": 0, "loss": 1.5}\n{"step": 1, "loss": 1.25}\n')
    np.save(folder / "ids.npy", np.arange(6).reshape(2, 3))
    return readers | {
        "rank-0.npz": load_record, "placement.json": load_placement, "config.json": load_model_config, "matrix.csv": load_matrix,
        "loads.csv": load_loads, "requests.csv": load_requests, "requests.jsonl": load_requests, "prompts.jsonl": load_arriving,
        "corpus.jsonl": lambda path: check_corpus([path]), "ids.npy": load_token_ids, "log.jsonl": logged_steps,
    }  # fmt: skip


READERS = [
    "stat.pt", "passes.pt", "rank0.safetensors", "vllm.jsonl", "loads.npy", "tokens.npz", "counts.csv", RANK_CSV, "profile.npz",
    "plan.json", "trace.npz", "curves.npz", "rank-0.npz", "leaf-spine-16.toml", "gpus.toml", "vllm-map.jsonl", "sglang.json",
    "eplb.json", "vllm-ascend.json", "trtllm.yaml", "vllm-list.json", "placement.json", "config.json", "matrix.csv", "loads.csv",
    "requests.csv", "requests.jsonl", "prompts.jsonl", "corpus.jsonl", "ids.npy", "log.jsonl",
]  # fmt: skip
TEXTS = [name for name in READERS if Path(name).suffix in (".json", ".jsonl", ".toml", ".yaml", ".csv")]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    return folder, written(folder)


@contextmanager
def ending():
    """Ends what hangs."""
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)


def said_of(read, path):
    """The sentence that refuses a file; None if it is read."""
    before = sorted(os.listdir(path.parent))
    try:
        with ending():
            read(path)
    except AuroraError as error:
        said = str(error)
        assert path.name in said or said.startswith("import: ")
        assert "\n" not in said
        assert len(said) < 5000
        return said
    finally:
        assert sorted(os.listdir(path.parent)) == before
    return None


def test_every_good_file_is_read(good):
    folder, readers = good
    assert sorted(readers) == sorted(READERS)
    for name, read in readers.items():
        read(folder / name)


def bomb(levels=30, merged=False):
    """YAML whose aliases, or merged mappings, are 2 ** levels entries where they are written out."""
    first, rest = ("{x0: 1}", "{{<<: [*a{0}, *a{0}], x{1}: 1}}") if merged else ("[0, 0]", "[*a{0}, *a{0}]")
    lines = [f"a0: &a0 {first}", *(f"a{n + 1}: &a{n + 1} {rest.format(n, n + 1)}" for n in range(levels))]
    return "\n".join([*lines, f"initial_global_assignments: *a{levels}", ""]).encode()


HOSTILE = {
    "nothing": b"", "blank": b" \n", "zeros": bytes(64), "UTF-16": '{"a": 1}'.encode("utf-16"), "Latin-1": "{'é': 1}".encode("latin-1"),
    "deep lists": b"[" * 100_000, "deep objects": b'{"a":' * 100_000, "many digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "twice": b'{"schema": 1, "schema": 1}', "a pickle": b"\x80\x04K\x01.", "gzip": b"\x1f\x8b\x08\x00" + bytes(40), "zip": b"PK\x03\x04",
    "aliases": bomb(), "merged": bomb(merged=True), "loop": b"a: &a [*a]\ninitial_global_assignments: {0: *a}\n",
    "long rows": b"a: &a [" + b"0, " * 99_999 + b"0]\ninitial_global_assignments: {"
    + b", ".join(b"%d: *a" % n for n in range(4000)) + b"}\n",
    "unending": b"infinity,nan,1e999\n", "wide": b"1," * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_files_of_other_kinds_are_refused(good, tmp_path, name):
    """None of these is a file of any format; a log of training that says nothing has no steps."""
    read, path = good[1][name], tmp_path / name
    refuses = name not in ("log.jsonl", "corpus.jsonl")
    for what, content in HOSTILE.items():
        path.write_bytes(content)
        said = said_of(read, path)
        assert said is not None or not refuses, what
    path.unlink()
    os.mkfifo(path)
    assert name == "log.jsonl" or "not a regular file" in said_of(read, path) or "expected" in said_of(read, path)
    path.unlink()
    (tmp_path / "other").symlink_to(path)
    path.symlink_to(tmp_path / "other")
    assert name == "log.jsonl" or said_of(read, path) is not None


@pytest.mark.parametrize("name", TEXTS)
def test_a_byte_order_mark_is_skipped_and_a_cut_text_is_refused(good, tmp_path, name):
    folder, readers = good
    content, path = (folder / name).read_bytes(), tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + content)
    assert said_of(readers[name], path) is None
    if Path(name).suffix == ".json":
        path.write_bytes(content[:-5])
        assert "not JSON" in said_of(readers[name], path)
        key = next(iter(json.loads(content)), "") if content.startswith(b"{") else ""
        if key:  # which it has twice
            path.write_bytes(content.replace(b"{", b'{"%s": 0, ' % key.encode(), 1))
            assert "twice" in said_of(readers[name], path)


def test_keys_that_come_twice_are_refused(good, tmp_path):
    folder, readers = good
    for name, column in (("counts.csv", "layer"), ("requests.csv", "arrival_s")):
        path = write(tmp_path / name, (folder / name).read_text().replace(f"{column},", f"{column},{column},", 1))
        assert f"expected each key once, found '{column}' twice" in said_of(readers[name], path)
    for name, member in (("profile.npz", "about.npy"), ("stat.pt", "stat/data.pkl")):
        path = Path(shutil.copy(folder / name, tmp_path))
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr(member, archive.read(member))
        assert f"expected each key once, found '{member}' twice" in said_of(readers[name], path)


def test_more_than_an_archive_or_an_array_may_hold_is_not_unpacked(good, tmp_path, monkeypatch):
    folder, readers = good
    torch.save({"logical_count": torch.zeros(1, dtype=torch.long).expand(2, 1 << 40)}, tmp_path / "stat.pt")
    assert "declares 17592186044416 bytes" in said_of(readers["stat.pt"], tmp_path / "stat.pt")
    with (tmp_path / "loads.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (1 << 50, 4)})
    assert "expected an .npy array of numbers" in said_of(readers["loads.npy"], tmp_path / "loads.npy")
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    monkeypatch.setattr(files, "MOST_TEXT", 10)
    monkeypatch.setattr(np, "load", None)
    for name in ("profile.npz", "tokens.npz", "passes.pt"):
        assert "the archive: declares" in said_of(readers[name], Path(shutil.copy(folder / name, tmp_path)))
    assert "the text: declares 20 bytes, expected at most 10" in said_of(
        readers["matrix.csv"], write(tmp_path / "matrix.csv", "1" * 20)
    )


def write(path, text):
    path.write_text(text)
    return path


# Values of another type than the one that is known.

OTHERS = {int: ["1", 1.5, True, [1], {}], float: ["1.5", True, [1.5], float("nan")], str: [5, True, ["x"]], bool: [5, "true"]}
UNREAD = {"num_redundant_experts", "version", "log2phy", "logcnt", "layer_updates_per_iter", "digest"}
LENIENT = {"requests.jsonl", "log.jsonl", "config.json"}  # numbers may be texts; a config is checked by who takes sizes from it


def spots(value, path=()):
    """The path of every place in nested values."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from spots(child, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(value, path, new):
    """Nested values with another one in one place; Ellipsis: with none."""
    if not path:
        return None if new is ... else new
    made = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del made[path[0]]
    else:
        made[path[0]] = changed(value[path[0]], path[1:], new)
    return made


def table_of(name, content):
    """The nested values of a file, and what makes a file of them."""
    match Path(name).suffix:
        case ".json":
            return json.loads(content), lambda made: json.dumps(
                made | {"digest": _digest(made)} if "digest" in made else made
            ).encode()
        case ".jsonl":
            first, _, rest = content.partition(b"\n")
            return json.loads(first), lambda made: json.dumps(made).encode() + b"\n" + rest
        case ".toml":
            return tomllib.loads(content.decode()), lambda made: tomli_w.dumps(made).encode()
        case ".yaml":
            return yaml.safe_load(content), lambda made: yaml.safe_dump(made).encode()
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    return json.loads(str(arrays["about"])), lambda made: archive(arrays | {"about": np.array(json.dumps(made))})


def archive(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


TABLES = [name for name in READERS if name.endswith((".json", ".jsonl", ".toml", ".yaml", ".npz")) and name != "tokens.npz"]


@pytest.mark.parametrize("name", [name for name in TABLES if name not in LENIENT])
def test_values_of_other_types_are_refused(good, tmp_path, name):
    folder, readers = good
    table, made_of = table_of(name, (folder / name).read_bytes())
    places = {
        tuple("#" if isinstance(key, int) else re.sub("[0-9]+", "#", str(key)) for key in path): path for path in spots(table)
    }
    for path in places.values():
        for other in OTHERS.get(type(at(table, path)), ()) if not UNREAD & {*path} else ():
            (tmp_path / name).write_bytes(made_of(changed(table, path, other)))
            assert said_of(readers[name], tmp_path / name) is not None, f"{path}: {other!r}"


@pytest.mark.parametrize("name", [name for name in READERS if name.endswith((".npz", ".npy"))])
def test_arrays_of_other_types_are_refused(good, tmp_path, name):
    folder, readers = good
    found = np.load(folder / name, allow_pickle=False)
    arrays = dict(found) if name.endswith(".npz") else {"": np.asarray(found)}
    for array_name, array in arrays.items():
        kinds = [array.astype(str), array.astype("S8"), array[..., None]] if array_name != "about" else [np.zeros(3)]
        if array.dtype.kind in "iuf":
            kinds += [
                array.astype(np.complex64),
                array.astype("datetime64[s]"),
                array.astype(object),
                np.full(array.shape, np.nan),
            ]
        for other in kinds:
            if name.endswith(".npz"):
                np.savez(tmp_path / name, **arrays | {array_name: other})
            else:
                np.save(tmp_path / name, other)
            assert said_of(readers[name], tmp_path / name) is not None, f"{array_name}: {other.dtype}"


# What chance makes of a file.

ODD = [
    None, True, False, 0, -1, -3, 1.5, 10**30, -(10**30), float("nan"), float("inf"), "", "x", "1_0", "１", "1", "\x1b[2J", [], {},
    [[]], [1, [2]], {"a": 1}, [True], [None] * 3, 2**62, 2**63,
]  # fmt: skip


def bytes_changed(draw, content):
    """The content with bytes flipped, taken out, put in, or cut off."""
    content = bytearray(content)
    where = draw(st.integers(0, max(0, len(content) - 1)))
    match draw(st.sampled_from(["flip", "cut", "gap", "put in", "twice"])):
        case "flip" if content:
            content[where] ^= draw(st.integers(1, 255))
        case "cut":
            del content[where:]
        case "gap":
            del content[where : where + draw(st.integers(1, 40))]
        case "put in":
            odd = [b"[" * 100_000, b'{"a":' * 100_000, b"\0", b"\xff\xfe", b"9" * 5000, b"-", b"_", b"true", b"1e999"]
            content[where:where] = draw(st.sampled_from(odd) | st.binary(max_size=8))
        case "twice":
            content *= 2
    return bytes(content)


def values_changed(draw, name, content):
    """The content with a value, an array or a tensor of another kind in some place."""
    match Path(name).suffix:
        case ".csv":
            lines = content.decode().splitlines()
            row = draw(st.integers(0, len(lines) - 1))
            cells = lines[row].split(",")
            cells[draw(st.integers(0, len(cells) - 1))] = str(draw(st.sampled_from(ODD)))
            return "\n".join([*lines[:row], ",".join(cells), *lines[row + 1 :]]).encode()
        case ".pt":
            found = torch.load(io.BytesIO(content), weights_only=True)
            tensors = [torch.zeros(0), torch.ones(2, 2, 2, 2), torch.eye(3).to_sparse(), torch.tensor(1.5)]
            made = io.BytesIO()
            torch.save(
                changed(found, draw(st.sampled_from(list(spots(found)))), draw(st.sampled_from([*ODD, ..., *tensors]))), made
            )
            return made.getvalue()
        case ".npz" if draw(st.booleans()) or name == "tokens.npz":
            with np.load(io.BytesIO(content)) as file:
                arrays = dict(file)
            which = draw(st.sampled_from(sorted(arrays)))
            arrays[which] = array_changed(draw, arrays[which])
            return archive({each: array for each, array in arrays.items() if array is not None})
        case ".npy":
            made = io.BytesIO()
            np.save(made, np.asarray(array_changed(draw, np.load(io.BytesIO(content)))), allow_pickle=True)
            return made.getvalue()
    table, made_of = table_of(name, content)
    try:
        return made_of(changed(table, draw(st.sampled_from(list(spots(table)))), draw(st.sampled_from([*ODD, ...]))))
    except (TypeError, ValueError, AttributeError):  # which TOML has no words for
        return b""


def array_changed(draw, array):
    """An array of other values, type or shape, or None."""
    if array.dtype.kind not in "iuf":
        return draw(st.sampled_from([None, np.array("{}"), np.zeros(2)]))
    changes = [
        lambda a: a.astype(np.float64) * 1.5, lambda a: a.astype(bool), lambda a: a[None], lambda a: a[:0], lambda a: a.ravel(),
        np.zeros_like, lambda a: -a.astype(np.int64) - 1, lambda a: np.full(a.shape, 2**62), lambda a: np.concatenate([a, a]),
        lambda a: None,
    ]  # fmt: skip
    return draw(st.sampled_from(changes))(array)


def damage(good, name, data):
    folder, readers = good
    content, path = (folder / name).read_bytes(), folder / "damaged" / name
    path.parent.mkdir(exist_ok=True)
    as_bytes = name.endswith(".safetensors") or data.draw(st.booleans(), "bytes")
    path.write_bytes(bytes_changed(data.draw, content) if as_bytes else values_changed(data.draw, name, content))
    said_of(readers[name], path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(good, name, data):
    damage(good, name, data)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_or_refused_at_length(good, name, data):
    damage(good, name, data)


def test_files_that_are_no_data_of_ours(tmp_path):
    for read in (read_text, file_digest):
        os.mkfifo(tmp_path / read.__name__)
        with ending(), pytest.raises(BadInput, match="not a regular file"):
            read(tmp_path / read.__name__)
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"f: expected UTF-8 text, found byte 0xff, as in text of another encoding"):
        read_text(tmp_path / "f")


def test_a_file_is_whole_or_not_there(good, tmp_path, monkeypatch):
    """Also a plan that is broken, a loop of links, and a disk that is full."""
    profile = aurora.load(good[0] / "profile.npz")
    save(profile, tmp_path / "no-suffix")  # a name is taken as it is given
    before = (tmp_path / "no-suffix").read_bytes()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    for name in ("one", "two/below", "nowhere/below", "."):
        with pytest.raises(BadInput, match="cannot be written"):
            save(profile, tmp_path / name)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BadInput, match="cannot be written: No space left"):
        save(profile, tmp_path / "no-suffix")
    assert (tmp_path / "no-suffix").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["no-suffix", "one", "two"]
