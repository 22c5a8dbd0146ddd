"""Which machine a result was measured on."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """Returns the processor's name as the kernel gives it, and the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def machine() -> str:
    """Returns the same, and that no GPU is used."""
    return f"{processor()}, no GPU"
