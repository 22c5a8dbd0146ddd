"""Float64 throughout: transformers' norms and routers cast to float32 whatever the dtype of the weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Throughout(TorchFunctionMode):
    """Context manager in which casts to float32 are casts to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch."""
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: _exact(each) for name, each in (kwargs or {}).items()}
        return func(*map(_exact, args), **named)


def _exact(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
