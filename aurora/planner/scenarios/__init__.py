"""Cases of planning: one model that has the GPUs to itself, models that share every GPU, and models on servers.

A plan loads the case that it is of.
"""

from typing import TYPE_CHECKING

from aurora.lazy_names import fetcher

if TYPE_CHECKING:
    from aurora.planner.scenarios.colocated import Colocated as Colocated
    from aurora.planner.scenarios.exclusive import Exclusive as Exclusive
    from aurora.planner.scenarios.servers import Servers as Servers
else:
    NAMES = {"colocated": "Colocated", "exclusive": "Exclusive", "servers": "Servers"}
    __all__, __getattr__ = fetcher(__name__, NAMES)
