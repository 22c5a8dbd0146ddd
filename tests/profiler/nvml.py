"""NVML's answers from a file instead of a driver: what pynvml would say, call by call."""

import json
from pathlib import Path
from types import SimpleNamespace

MACHINES = Path(__file__).parent / "machines"
CODES = {"NVML_ERROR_INVALID_ARGUMENT": 2, "NVML_ERROR_NOT_SUPPORTED": 3, "NVML_ERROR_GPU_IS_LOST": 15}
CONSTANTS = {
    "NVML_CLOCK_SM": 1,
    "NVML_CLOCK_MEM": 2,
    "NVML_DEVICE_MIG_ENABLE": 1,
    "NVML_FEATURE_ENABLED": 1,
    "NVML_NVLINK_MAX_LINKS": 36,
    "NVML_P2P_CAPS_INDEX_NVLINK": 2,
    "NVML_P2P_STATUS_OK": 0,
    **CODES,
}


class NVMLError(Exception):
    def __init__(self, name):
        super().__init__(name.removeprefix("NVML_ERROR_").replace("_", " ").capitalize())
        self.value = CODES[name]


class Replay:
    """Answers of one machine: by call, then by its arguments, joined by a comma; `*` stands for all others.

    A text that begins with NVML_ERROR_ is raised; a list under "sequence" is answered one by one, the last again and again.
    """

    NVMLError = NVMLError

    def __init__(self, machine):
        self._answers = json.loads((MACHINES / f"{machine}.json").read_text()) if isinstance(machine, str) else machine

    def __getattr__(self, name):
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name not in self._answers:
            raise AttributeError(name)

        def answer(*about):
            key = ",".join(map(str, about))
            known = self._answers[name]
            found = known.get(key, known.get("*", "NVML_ERROR_INVALID_ARGUMENT"))
            if isinstance(found, dict) and "sequence" in found:
                found = found["sequence"].pop(0) if len(found["sequence"]) > 1 else found["sequence"][0]
            if isinstance(found, str) and found.startswith("NVML_ERROR_"):
                raise NVMLError(found)
            return SimpleNamespace(**found) if isinstance(found, dict) else found

        return answer
