"""The judge of layouts: recomputes them from loads and room alone. It calls none of the makers."""

import numpy as np

from aurora.errors import BrokenPlan
from aurora.types import Layout, Room
from aurora.types.arrays import FloatArray

SLACK = 1e-9  # relative, for sums of float loads


def check_layout(layout: Layout, load_LE: FloatArray, room: Room) -> None:
    """BrokenPlan unless every expert is held, no GPU holds more than its slots or one expert twice, the shares of each expert
    are on GPUs that hold it, none negative, and add up to one, and the largest load is what it is said to be and not below
    the bound. load_LE (L, E) float64."""
    what = f"layout {layout.method}"
    placement = layout.placement
    if len(placement.slots_LG) != len(load_LE) or placement.gpus != room.gpus:
        raise BrokenPlan(
            f"{what}: expected {len(load_LE)} layers on {room.gpus} GPUs, found {len(placement.slots_LG)} on {placement.gpus}"
        )
    for layer, load_E in enumerate(load_LE):
        where = f"{what}, layer {layer}"
        load_G = np.zeros(room.gpus)
        share_E = np.zeros(len(load_E))
        for gpu, held in enumerate(placement.slots_LG[layer]):
            if len(held) > room.slots_G[gpu]:
                raise BrokenPlan(f"{where}: GPU {gpu} holds {len(held)} experts in {room.slots_G[gpu]} slots")
            if len(set(held)) != len(held):
                raise BrokenPlan(f"{where}: GPU {gpu} holds an expert twice: {list(held)}")
            shares = [1.0] * len(held) if placement.split_LG is None else placement.split_LG[layer][gpu]
            for expert, share in zip(held, shares, strict=True):
                if not 0 <= expert < len(load_E):
                    raise BrokenPlan(f"{where}: GPU {gpu} holds expert {expert} of {len(load_E)}")
                if not share >= 0:
                    raise BrokenPlan(f"{where}: GPU {gpu} takes {share} of expert {expert}")
                share_E[expert] += share
                load_G[gpu] += share * load_E[expert]
        if (wrong := abs(share_E - 1) > SLACK).any():
            expert = int(wrong.argmax())
            raise BrokenPlan(f"{where}: the shares of expert {expert} add up to {share_E[expert]}")
        found = float((load_G * room.cost_G).max())
        if abs(found - layout.max_load_L[layer]) > SLACK * found:
            raise BrokenPlan(f"{where}: claims a largest load of {layout.max_load_L[layer]:.9g}, its shares give {found:.9g}")
        mean = float(load_E.sum() / (1 / room.cost_G).sum())
        if abs(mean - layout.mean_load_L[layer]) > SLACK * mean:
            raise BrokenPlan(f"{where}: claims a mean load of {layout.mean_load_L[layer]:.9g}, found {mean:.9g}")
        if not mean * (1 - SLACK) <= layout.bound_L[layer] * (1 + SLACK) <= found * (1 + 3 * SLACK):
            raise BrokenPlan(
                f"{where}: expected mean {mean:.9g} <= bound <= largest load {found:.9g}, found {layout.bound_L[layer]:.9g}"
            )
