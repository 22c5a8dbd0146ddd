"""Which ranks get memory that all can write, and what the others are told."""

from types import SimpleNamespace

import pytest
import torch

from aurora.runtime.transports import symmetric_memory

APART = "expected GPUs that NVLink connects, each to each, found others by NVML"
NO_FABRIC = "expected GPUs of one machine or one NVLink fabric, found 2 machines and by NVML no fabric of all"


@pytest.mark.parametrize(
    ("machines", "linked", "fabrics", "error", "said"),
    [
        (1, True, ("", ""), "", None),
        (1, None, ("", ""), "", None),  # NVML does not tell: they try
        (1, False, ("", ""), "", APART),
        (2, None, ("a-0", "a-0"), "", None),
        (2, None, ("a-0", "a-1"), "", NO_FABRIC),
        (2, None, ("", ""), "", NO_FABRIC),
        (
            1,
            True,
            ("", ""),
            "no fabric handle\nat",
            "expected GPUs that share memory, found some that do not: rank 0: no fabric handle",
        ),
    ],
)
def test_nvml_is_a_hint_and_a_try_decides(machines, linked, fabrics, error, said, monkeypatch):
    """Without a common fabric ranks of several machines do not try, as they would wait for ever."""
    tried = []

    def gather(sent):
        """Of two ranks, the other of which is on another machine or in another fabric."""
        other = {symmetric_memory.Path("/proc/sys/kernel/random/boot_id").read_text().strip(): "b" if machines == 2 else None}
        text = bytes(sent.tolist()).rstrip(b"\0").decode()
        differs = other.get(text) or (fabrics[1] if text == fabrics[0] != fabrics[1] else None)
        peer = sent if differs is None else torch.tensor([*differs.encode().ljust(256, b"\0")], dtype=torch.uint8)
        return torch.stack([sent, peer])

    def allocate(group, size, device):
        tried.append(size)
        if error:
            raise RuntimeError(error)

    monkeypatch.setattr(symmetric_memory, "linked_by_nvlink", lambda uuids: linked)
    monkeypatch.setattr(symmetric_memory, "fabric_of", lambda uuid: fabrics[0])
    monkeypatch.setattr(symmetric_memory, "device_memory", allocate)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    made = symmetric_memory.memory_of_peers(gather, 0, 2, "cuda:0", "group")
    assert (made if isinstance(made, str) else None) == said
    assert len(tried) == (said is None or bool(error))


def test_cpus_have_none_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    made = symmetric_memory.memory_of_peers(lambda sent: sent[None], 0, 1, "cpu")
    assert made == "expected GPUs that NVLink connects, each to each, found CPUs"
