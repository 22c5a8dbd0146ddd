"""Limits of options, and the checks of their numbers."""

from aurora.errors import BadInput

LONGEST_S = 1e6  # seconds that an option can ask to wait: eleven days
MOST_PROCESSES = 256  # that an option can ask for on one machine
MOST = {  # the largest value of an option, by name: far above use, below what would hang or fill the memory
    "sources": 4096,
    "prompt_tokens": 1 << 20,
    "batch": 1 << 20,
    "max_new_tokens": 1 << 20,
    "limit": 1 << 40,
    "share": MOST_PROCESSES,
    "window": 1 << 40,
    "precision": 1.0,
    "workers": 1024,
    "redundancy": 1024,
    "timeout_s": LONGEST_S,
    "hang_s": LONGEST_S,
    "time_limit_s": LONGEST_S,
    "respawn": 1000,
    "min_ranks": 4096,
    "window_tokens": 1 << 30,
    "windows": 1 << 20,
    "lasting": 1 << 40,
    "tokens": 1 << 40,
    "slots_per_gpu": 1 << 16,
    "min_replicas": 1 << 16,
    "hot": 1 << 16,
    "threshold": 1e6,
    "seeds": 1000,
    "load": 1000,
    "iterations": 10_000,
    "process_iterations": 10_000,
    "stretch": 1000.0,
    "points": 10_000,
    "features": 1_000_000,
    "draws": 100_000,
    "seed": 2**63 - 1,
    "steps": 1 << 40,
    "ranks": MOST_PROCESSES,
    "length": 1 << 20,
    "learning_rate": 1e6,
    "weight_decay": 1e6,
    "max_norm": 1e30,
    "router_loss": 1e6,
    "rebalance_every": 1 << 40,
    "checkpoint_every": 1 << 40,
    "rate": 1e6,
    "isl": 1 << 24,
    "osl": 1 << 24,
    "duration_s": LONGEST_S,
    "max_num_batched_tokens": 1 << 20,
    "max_num_seqs": 1 << 20,
    "preemption_s": LONGEST_S,
}


def above_zero(options: object, *names: str) -> None:
    """Raises BadInput unless each of these options is None or above zero, and at most its MOST."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise BadInput(f"`{name}`: expected more than zero, found {value}")
        at_most(name, value)


def zero_or_more(options: object, *names: str) -> None:
    """Raises BadInput unless each of these options is None or zero or more, and at most its MOST."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise BadInput(f"`{name}`: expected zero or more, found {value}")
        at_most(name, value)


def at_most(name: str, value: float | None) -> None:
    """Raises BadInput unless an option of this name is None or at most its MOST."""
    if value is not None and value > MOST[name]:
        raise BadInput(f"`{name}`: expected at most {MOST[name]}, found {value}")
