"""The scenarios of planning: `Exclusive` (one model per GPU), `Colocated` (models share every GPU), `OverServers`.

Each is imported when it is first used.
"""

from typing import TYPE_CHECKING

from aurora.lazy_names import fetcher

if TYPE_CHECKING:
    from aurora.planner.scenarios.colocated import Colocated as Colocated
    from aurora.planner.scenarios.exclusive import Exclusive as Exclusive
    from aurora.planner.scenarios.servers import OverServers as OverServers
else:
    NAMES = {"colocated": "Colocated", "exclusive": "Exclusive", "servers": "OverServers"}
    __all__, __getattr__ = fetcher(__name__, NAMES)
