"""Names that options accept, read from the registries when help or completion needs them."""

import importlib
import re
from collections.abc import Callable, Iterable, Sequence

from aurora.types import TIME_SLICES, PlanOptions
from aurora.types.options import ALL_TO_ALLS, MICRO_BATCH_COUNTS


def names(kind: str) -> tuple[str, ...]:
    """Returns the names of a kind of CHOICES, as they are registered now."""
    known = CHOICES[kind]
    return tuple(_named(known) if isinstance(known, str) else known())


def filled(text: str) -> str:
    """Returns `text` with every {kind} of CHOICES replaced by the names of that kind."""
    return re.sub(r"\{(\w+)\}", lambda found: ", ".join(names(found[1])) if found[1] in CHOICES else found[0], text)


def completed(*kinds: str, one_of: Sequence[str] = ()) -> Callable[[str], list[str]] | None:
    """Returns a shell completion function for the names of `one_of` and of these kinds of CHOICES; None if there are none."""
    if not kinds and not one_of:
        return None

    def complete(incomplete: str) -> list[str]:
        known = (*one_of, *(name for kind in kinds for name in names(kind)))
        return [name for name in known if name.startswith(incomplete)]

    return complete


def _named(path: str) -> Iterable[str]:
    """Returns the names in the registry at a path of module and name, or what the function there returns."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found() if callable(found) else found  # type: ignore[no-any-return]


def _planned(field: str, models: int = 1, min_replicas: int | None = None) -> tuple[str, ...]:
    from aurora.planner.resolve_options import choices

    return choices(PlanOptions(min_replicas=min_replicas), models)[field]


def _objectives() -> Iterable[str]:
    from aurora.planner.simulated_choice import SIMULATED

    return (*_planned("objective", models=2), *_planned("objective", models=3), SIMULATED, "auto")


def _routing_files() -> Iterable[str]:
    from aurora.io.routing_dumps import ROUTING_FORMATS

    return (f"{name} ({form.files})" for name, form in ROUTING_FORMATS.items())


def _report_forms() -> Iterable[str]:
    from aurora.reports.write import FORMS

    return ("; ".join(f"{name}: {form.about}" for name, form in FORMS.items()),)


def _report_outputs() -> Iterable[str]:
    from aurora.reports.write import FORMS

    return (form.output for form in FORMS.values())


def _changes() -> Iterable[str]:
    from aurora.simulator.changing_traffic import CHANGES, RECORDED

    return (*CHANGES, RECORDED)


def _sweep_keys() -> Iterable[str]:
    from dataclasses import fields

    from aurora.advisor.sweep import Setting

    return (field.name for field in fields(Setting))


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
    "train_scheme": lambda: (name for name in _named("aurora.planner.gradient_codes.SCHEMES") if name != "uncoded"),
    "engine": "aurora.planner.check.fit.ENGINES",
    "recommended_engine": "aurora.advisor.engines.SERVING_ENGINES",
    "placement_format": "aurora.io.engine_placements.PLACEMENT_FORMATS",
    "routing_format": "aurora.io.routing_dumps.ROUTING_FORMATS",
    "routing_files": _routing_files,
    "report_format": "aurora.reports.write.FORMS",
    "report_form": _report_forms,
    "report_output": _report_outputs,
    "change": _changes,
    "sweep_key": _sweep_keys,
    "gpu_kind": "aurora.io.load_gpus",
    "time_slice": lambda: TIME_SLICES,
    "micro_batches": lambda: ("auto", *map(str, MICRO_BATCH_COUNTS)),
    "all_to_all": lambda: (*ALL_TO_ALLS, "auto"),
}
