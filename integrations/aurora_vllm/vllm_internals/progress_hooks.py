"""Hooks that report to the watchdog when ranks wait outside of all-to-alls: at the start of passes, and in EPLB's thread."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from aurora_vllm.rank_progress import RankProgress
from aurora_vllm.stuck_rank import ENDED, MOVES, NO_BALANCER, PLANS, READY, RESTS, STEP, WAITS
from aurora_vllm.vllm_internals.api_checks import BALANCER_API_CHECKS, STEP_API_CHECKS, ApiCheck, find


def watch_steps(progress: RankProgress) -> None:
    """Patches vLLM to record in `progress` when this rank waits at the start of a pass, where ranks exchange token counts."""
    for check in STEP_API_CHECKS:
        if check.missing() is None:
            _wrap(check, lambda: progress.exchange[STEP])


def watch_balancer(balancer: Any) -> Callable[[], tuple[str, int]] | None:
    """Returns a function that returns (state of EPLB's background thread, number of layers whose moves it has begun).

    Returns None if there is no such thread, or if this vLLM fails the API checks.

    Args:
        balancer: vLLM's EplbState; None: EPLB is off.
    """
    if balancer is None or not balancer.is_async or any(check.missing() for check in BALANCER_API_CHECKS):
        return None
    doing, begun = RESTS, 0

    @contextmanager
    def at(what: str) -> Iterator[None]:
        nonlocal doing, begun
        doing, begun = what, begun + (what == MOVES)
        yield
        doing = RESTS

    plan, move = BALANCER_API_CHECKS
    _wrap(plan, lambda: at(PLANS))
    _wrap(move, lambda: at(MOVES))

    def state() -> tuple[str, int]:
        if (thread := balancer.async_worker) is None:
            return NO_BALANCER, 0
        models = balancer.model_states.values()
        found = READY if any(model.pending_result is not None for model in models) else doing
        if found == RESTS and any(model.rebalanced for model in models):
            found = WAITS
        return found if thread.is_alive() else ENDED, begun

    return state


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that runs each call of a function inside a new context manager from `context`."""

    def decorate(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapped(*args: Any, **named: Any) -> Any:
            with context():
                return original(*args, **named)

        return wrapped

    return decorate


def _wrap(check: ApiCheck, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Makes the function of a module that a check is of run in a context manager."""
    setattr(find(f"{check.where.partition(':')[0]}:"), check.name, within(context)(find(check.where)))
