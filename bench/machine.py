"""Which machine a result was measured on."""

from aurora.reproduce.machine import machine as processor


def machine() -> str:
    """The processor's name as the kernel gives it, and how many cores there are."""
    return f"{processor()}, no GPU"
