"""Names that options accept, read from the registries only when help or shell completion needs them."""

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from aurora.types import TIME_SLICES, PlanOptions
from aurora.types.options import ALL_TO_ALLS, MICRO_BATCH_COUNTS


def names(kind: str) -> tuple[str, ...]:
    """Returns the currently registered names of a kind (a key of CHOICES)."""
    known = CHOICES[kind]
    found = _at(known) if isinstance(known, str) else known
    return tuple(found() if callable(found) else found)


def filled(text: str) -> str:
    """Returns `text` with each placeholder {kind}, for a key of CHOICES, replaced by the names of that kind."""
    return re.sub(r"\{(\w+)\}", lambda found: ", ".join(names(found[1])) if found[1] in CHOICES else found[0], text)


def completed(*kinds: str, one_of: Sequence[str] = ()) -> Callable[[str], list[str]] | None:
    """Returns a shell completion function for the names in `one_of` and of the given kinds; None if there are none."""
    if not kinds and not one_of:
        return None

    def complete(incomplete: str) -> list[str]:
        known = (*one_of, *(name for kind in kinds for name in names(kind)))
        return [name for name in known if name.startswith(incomplete)]

    return complete


def _at(path: str) -> Any:
    """Returns the value at a path of module and name; the module is imported."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _planned(field: str, models: int = 1, min_replicas: int | None = None) -> tuple[str, ...]:
    from aurora.planner.resolve_options import choices

    return choices(PlanOptions(min_replicas=min_replicas), models)[field]


def _objectives() -> Iterable[str]:
    from aurora.planner.simulated_choice import SIMULATED

    return (*_planned("objective", models=2), *_planned("objective", models=3), SIMULATED, "auto")


CHOICES: dict[str, str | Callable[[], Iterable[str]]] = {  # by kind: where the names are, or a function that returns them
    "place": lambda: _planned("place"),
    "colocated_place": lambda: _planned("place", models=2),
    "survive": lambda: _planned("place", min_replicas=2),
    "assign": lambda: (*_planned("assign"), "auto"),
    "colocate": lambda: (*_planned("colocate"), "auto"),
    "order": lambda: (*_planned("order"), "auto"),
    "objective": _objectives,
    "aim": lambda: (*_planned("aim"), "auto"),
    "replicas": "aurora.planner.replication.registry.REPLICAS",
    "train_scheme": lambda: (name for name in _at("aurora.planner.gradient_codes.SCHEMES") if name != "uncoded"),
    "engine": "aurora.planner.check.fit.ENGINES",
    "recommended_engine": "aurora.advisor.engines.SERVING_ENGINES",
    "placement_format": "aurora.io.engine_placements.PLACEMENT_FORMATS",
    "routing_format": "aurora.io.routing_dumps.ROUTING_FORMATS",
    "routing_files": lambda: (
        f"{name} ({form.files})" for name, form in _at("aurora.io.routing_dumps.ROUTING_FORMATS").items()
    ),
    "report_format": "aurora.reports.write.FORMS",
    "change": lambda: (*_at("aurora.simulator.changing_traffic.CHANGES"), _at("aurora.simulator.changing_traffic.RECORDED")),
    "sweep_key": lambda: (field.name for field in fields(_at("aurora.advisor.sweep.Setting"))),
    "gpu_kind": "aurora.io.load_gpus",
    "time_slice": lambda: TIME_SLICES,
    "micro_batches": lambda: ("auto", *map(str, MICRO_BATCH_COUNTS)),
    "all_to_all": lambda: (*ALL_TO_ALLS, "auto"),
}
