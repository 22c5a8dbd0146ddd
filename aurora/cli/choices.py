"""Names that options accept, read from the registries when help or completion needs them."""

import re
from collections.abc import Callable, Iterable, Sequence

from aurora.types import BARRIERS, PRIORITIES, TIME_SLICES, PlanOptions
from aurora.types.options import ALL_TO_ALLS, LINK_TRANSPORTS, MICRO_BATCH_COUNTS, SIMULATED_ORDERS


def names(kind: str) -> tuple[str, ...]:
    """Returns the names of a kind of CHOICES, as they are registered now."""
    return tuple(CHOICES[kind]())


def filled(text: str) -> str:
    """Returns `text` with every {kind} of CHOICES replaced by the names of that kind."""
    return re.sub(r"\{(\w+)\}", lambda found: ", ".join(names(found[1])) if found[1] in CHOICES else found[0], text)


def completed(*kinds: str, names: Sequence[str] = ()) -> Callable[[str], list[str]] | None:
    """Returns a shell completion function for `names` and those of these kinds of CHOICES; None if there are none."""
    if not kinds and not names:
        return None

    def complete(incomplete: str) -> list[str]:
        known = (*names, *(name for kind in kinds for name in CHOICES[kind]()))
        return [name for name in known if name.startswith(incomplete)]

    return complete


def _planned(field: str, models: int = 1, min_replicas: int | None = None) -> tuple[str, ...]:
    from aurora.planner.resolve_options import choices

    return choices(PlanOptions(min_replicas=min_replicas), models)[field]


def _objectives() -> Iterable[str]:
    from aurora.planner.simulated_choice import SIMULATED

    return (*_planned("objective", models=2), *_planned("objective", models=3), SIMULATED, "auto")


def _replicas() -> Iterable[str]:
    from aurora.planner.replication.registry import REPLICAS

    return REPLICAS


def _schemes() -> Iterable[str]:
    from aurora.planner.gradient_codes import SCHEMES

    return SCHEMES


def _train_schemes() -> Iterable[str]:
    return (name for name in _schemes() if name != "uncoded")  # which has no redundancy


def _engines() -> Iterable[str]:
    from aurora.planner.check.fit import ENGINES

    return ENGINES


def _recommended_engines() -> Iterable[str]:
    from aurora.advisor.recommend import SERVING_ENGINES

    return SERVING_ENGINES


def _placement_formats() -> Iterable[str]:
    from aurora.io.engine_placements import PLACEMENT_FORMATS

    return PLACEMENT_FORMATS


def _routing_formats() -> Iterable[str]:
    from aurora.io.routing_dumps import ROUTING_FORMATS

    return ROUTING_FORMATS


def _routing_files() -> Iterable[str]:
    from aurora.io.routing_dumps import ROUTING_FORMATS

    return (f"{name} ({form.files})" for name, form in ROUTING_FORMATS.items())


def _exchanges() -> Iterable[str]:
    from aurora.io.silicon_database import EXCHANGES

    return EXCHANGES


def _report_formats() -> Iterable[str]:
    from aurora.reports.write import FORMS

    return FORMS


def _changes() -> Iterable[str]:
    from aurora.simulator.changing_traffic import CHANGES, RECORDED

    return (*CHANGES, RECORDED)


def _sweep_keys() -> Iterable[str]:
    from dataclasses import fields

    from aurora.advisor.sweep import Setting

    return (field.name for field in fields(Setting))


def _gpu_kinds() -> Iterable[str]:
    from aurora.io import load_gpus

    return load_gpus()


CHOICES: dict[str, Callable[[], Iterable[str]]] = {
    "place": lambda: _planned("place"),
    "colocated_place": lambda: _planned("place", models=2),
    "survive": lambda: _planned("place", min_replicas=2),
    "assign": lambda: (*_planned("assign"), "auto"),
    "colocate": lambda: (*_planned("colocate"), "auto"),
    "order": lambda: (*_planned("order"), "auto"),
    "objective": _objectives,
    "aim": lambda: (*_planned("aim"), "auto"),
    "replicas": _replicas,
    "train_scheme": _train_schemes,
    "engine": _engines,
    "recommended_engine": _recommended_engines,
    "placement_format": _placement_formats,
    "routing_format": _routing_formats,
    "routing_files": _routing_files,
    "exchange": _exchanges,
    "report_format": _report_formats,
    "change": _changes,
    "sweep_key": _sweep_keys,
    "gpu_kind": _gpu_kinds,
    "time_slice": lambda: TIME_SLICES,
    "priority": lambda: PRIORITIES,
    "micro_batches": lambda: ("auto", *map(str, MICRO_BATCH_COUNTS)),
    "all_to_all": lambda: (*ALL_TO_ALLS, "auto"),
    "link_transport": lambda: LINK_TRANSPORTS,
    "simulated_order": lambda: SIMULATED_ORDERS,
    "barriers": lambda: BARRIERS,
}
