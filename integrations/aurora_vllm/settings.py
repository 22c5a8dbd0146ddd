"""Settings of the plugin: `--additional-config '{"aurora": {...}}'`, or else AURORA_* environment variables."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from aurora.errors import AuroraError, BadInput
from aurora.types import ControlOptions
from aurora.types.options import MOST_PORT, Limits, Seconds, check_options

ORDERS = ("plan", "online", "push", "stock")
ALL_TO_ALLS = ("auto", "flat", "hierarchical")
REQUESTS = ("stock", "tokens", "cadence")
PREFIX = "AURORA_"
JOINS = "AURORA_RANK_JOINS"  # `aurora vllm` sets it for a rank that comes back, beside those that serve
SECRET = "AURORA_COMMAND_SECRET"  # `aurora vllm` makes it at each start: servers obey its commands alone
SHARED_FOLDER = "AURORA_SHARED_FOLDER"  # of all processes of one `aurora vllm`, which removes it at its end
OTHER_VARIABLES = ("AURORA_DATA", "AURORA_DEBUG", "AURORA_STATUS_FOLDER", JOINS, SECRET, SHARED_FOLDER)  # which are no settings
TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Settings:
    """User settings of the plugin.

    Args:
        plan: file of a plan of one model, for as many GPUs as vLLM has expert-parallel ranks; None: vLLM's own placement.
        order: method and order of all-to-alls. "stock": vLLM's allgather and reduce-scatter. "plan": messages in the plan's
            order, without CUDA graphs. "online": messages in an order computed for every batch, without CUDA graphs. "push":
            GPUs connected by NVLink write rows into each other's memory, in the plan's order, under CUDA graphs; on other GPUs
            like "stock".
        all_to_all: hops of all-to-alls by messages. "flat": each row goes straight to its rank. "hierarchical": each row goes
            once to each server, and from there to its ranks. "auto": as planned.
        requests: ranks of requests, of `vllm serve` with data-parallel ranks. "stock": vLLM's own rule, by numbers of requests.
            "tokens": the rank with the fewest prompt tokens to compute, then the least used KV cache. "cadence": the same, and
            all ranks compute prompts in every k-th step; k is planned from the load.
        ttft_s: with the requests "cadence": seconds within which a prompt of one step should have its first token, which
            bounds k; None: no bound.
        record: folder into which every rank writes its record; None: no record.
        record_every_s: seconds between two writes of the record.
        metrics_port: rank r serves its metrics at this port + r; None: only on vLLM's own /metrics, if that can show them.
        metrics_host: address that `metrics_port` listens on.
        adapt: True: adapt the placement to traffic, through EPLB (`--enable-eplb`).
        loss: with adapt: the present placement is kept while it costs the slowest GPUs at most this share of their time.
        dry_run: with adapt: True: move nothing, and log what would move.
        fault_store: address of the rendezvous store for continuing without lost ranks; set by `aurora vllm`.
        required: True: the server ends if the plugin cannot do what its settings request; False: vLLM serves without it.

    Raises:
        BadInput: if a value is out of range, or two values contradict each other.
    """

    plan: Path | None = None
    order: Annotated[str, Limits(one_of=ORDERS)] = "stock"
    all_to_all: Annotated[str, Limits(one_of=ALL_TO_ALLS)] = "auto"
    requests: Annotated[str, Limits(one_of=REQUESTS)] = "stock"
    ttft_s: Seconds | None = None
    record: Path | None = None
    record_every_s: Seconds = 60.0
    metrics_port: Annotated[int | None, Limits(least=1, most=MOST_PORT)] = None
    metrics_host: str = "127.0.0.1"
    adapt: bool = False
    loss: float = ControlOptions.loss
    dry_run: bool = False
    fault_store: str | None = None
    required: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.order == "plan" and self.plan is None:
            raise BadInput('order: expected a plan for "plan", found none; "online" needs none')
        if self.all_to_all == "hierarchical" and self.order not in ("plan", "online"):
            raise BadInput(f"all_to_all: expected the order plan or online, whose messages take two hops, found {self.order!r}")
        if self.all_to_all == "hierarchical" and self.plan is None:
            raise BadInput("all_to_all: expected a plan, which says which ranks share a server, found none")
        if self.ttft_s is not None and self.requests != "cadence":
            raise BadInput(f"ttft_s: expected the requests 'cadence', whose setting it is, found {self.requests!r}")
        ControlOptions(self.loss)
        for name in ("loss", "dry_run"):
            if not self.adapt and getattr(self, name) != getattr(Settings, name):
                raise BadInput(f"{name}: expected adapt, whose setting it is, found none")


def read_settings(given: Any, environ: Mapping[str, str]) -> Settings | None:
    """Reads the settings; None if the plugin is not configured.

    Args:
        given: the value of "aurora" in vLLM's additional_config; None if there is none.
        environ: environment variables; a value in `given` has precedence.

    Raises:
        BadInput: if a name is unknown, a value has the wrong type, or two values contradict each other.
    """
    names = [field.name for field in fields(Settings)]
    values: dict[str, Any] = {name: environ[key] for name in names if (key := PREFIX + name.upper()) in environ}
    if given is None and not values:
        return None
    if given is not None and not isinstance(given, Mapping):
        raise BadInput(f'additional_config: expected "aurora" to be an object, found {given!r}')
    for name in given or {}:
        if name not in names:
            raise BadInput(
                f"additional_config: aurora knows no {name!r}; expected {_meant(name, names, 0.6) or ', '.join(names)}"
            )
    values |= given or {}
    return Settings(**{name: _value(name, value) for name, value in values.items()})


def settings_of(config: Any) -> Settings | None:
    """Returns the settings in vLLM's configuration and this process's environment; None if the plugin is not configured."""
    additional = config.additional_config if isinstance(config.additional_config, dict) else {}
    return read_settings(additional.get("aurora"), os.environ)


def misspelt(additional: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a warning for each key or environment variable that looks like a misspelt name of a plugin setting.

    Args:
        additional: vLLM's additional_config.
        environ: environment variables.
    """
    variables = [PREFIX + field.name.upper() for field in fields(Settings)]
    for name in environ:
        if name.startswith(PREFIX[:3]) and name not in (*variables, *OTHER_VARIABLES) and (meant := _meant(name, variables)):
            yield f"the environment variable {name} is no setting of the plugin; expected {meant}"
    if "aurora" not in additional:
        for name in additional:
            if _meant(name, ["aurora"]):
                yield f"additional_config: nothing reads {name!r}; expected aurora"


def check_files(settings: Settings) -> None:
    """Checks that the plan can be read and that the record can be written.

    Raises:
        BadInput: if the plan's file is missing or is no plan, or `record` is no folder that can be created and written to.
    """
    if settings.plan is not None:
        from aurora.io import load_plan

        try:
            load_plan(settings.plan)
        except AuroraError as error:
            raise BadInput(f"plan: {error}") from None
    if settings.record is not None:
        try:
            settings.record.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=settings.record):
                pass
        except OSError as error:
            raise BadInput(f"record: expected a folder to write to, found {settings.record}: {error.strerror}") from None


def _meant(name: str, names: list[str], likeness: float = 0.8) -> str | None:
    """The name in `names` that was probably meant; None if none is as like it as `likeness`, from 0 to 1."""
    return next(iter(get_close_matches(name, names, 1, likeness)), None)


def _value(name: str, value: Any) -> Any:
    """`value` converted to the setting's type."""
    hint = get_type_hints(Settings)[name]
    kind = (get_args(hint) or (hint,))[0]  # of a union with None
    expected = {Path: "a path", float: "a number", int: "a whole number", str: "text", bool: "true or false"}[kind]
    if kind is bool and isinstance(value, str):
        value = TRUTH.get(value.lower(), value)
    if value is None:
        raise BadInput(f"{name}: expected {expected}, found null; leave the name out for the default")
    accepted = {float: float | int | str, int: float | int | str, bool: bool}.get(kind, str)
    if not isinstance(value, accepted) or isinstance(value, bool) is not (kind is bool):
        raise BadInput(f"{name}: expected {expected}, found {value!r}")
    try:
        return kind(value)
    except (ValueError, OverflowError):
        raise BadInput(f"{name}: expected {expected}, found {value!r}") from None
