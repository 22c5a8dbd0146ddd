"""The checks of orders and schedules once more, in plain loops: what the compiled ones are compared with."""

SLACK = 1e-9


def order_is_right(order, ranks):
    """Every pair of different ranks has parts that follow each other from 0 to 1, in one tier, and no other pair has any."""
    parts = {(src, dst): [] for src in range(ranks) for dst in range(ranks) if src != dst}
    for row, pair in enumerate(order.pairs_X2.tolist()):
        if tuple(pair) not in parts:
            return False
        share = (0.0, 1.0) if order.share_X2 is None else tuple(order.share_X2[row])
        parts[tuple(pair)].append((*share, 0 if order.tier_X is None else order.tier_X[row]))
    for of_pair in parts.values():
        ends = [0.0]
        for begin, end, _ in sorted(of_pair):
            if begin != ends[-1] or end < begin:
                return False
            ends.append(end)
        if ends[-1] != 1.0 or len({tier for _, _, tier in of_pair}) != 1:
            return False
    return True


def schedule_is_right(schedule, bytes_SGG, network):
    """Bytes of every step, rows that can be, ports and NICs within their rates at every start, partners and steps in turn."""
    steps, ranks, _ = bytes_SGG.shape
    columns = (schedule.src_X, schedule.dst_X, schedule.bytes_X, schedule.start_s_X, schedule.end_s_X, schedule.rate_Bps_X)
    zeros = [0] * len(schedule.src_X)
    tiers = zeros if schedule.tier_X is None else schedule.tier_X.tolist()
    numbers = zeros if steps == 1 else schedule.step_X.tolist()
    rows = [*zip(*(column.tolist() for column in columns), tiers, numbers, strict=True)]
    left = {(step, src, dst): int(bytes_SGG[step, src, dst]) for step, src, dst in _cells(steps, ranks, ranks)}
    for src, dst, size, start, end, rate, _, step in rows:
        if (step, src, dst) not in left:
            return False
        left[step, src, dst] -= size
        if not 0 <= start <= end or abs(rate * (end - start) - size) > 1 + SLACK * size + 1e-15 * rate * end:
            return False
    if any(left.values()):
        return False
    servers = network.servers
    for _, _, _, now, *_ in rows:
        used = {}
        for src, dst, _, start, end, rate, _, _ in rows:
            if start <= now < end:
                resources = [("out", src, network.out_Bps_G[src]), ("in", dst, network.in_Bps_G[dst])]
                if servers is not None and servers.server_G[src] != servers.server_G[dst]:
                    resources += [
                        ("nic out", servers.nic_G[src], servers.nic_Bps),
                        ("nic in", servers.nic_G[dst], servers.nic_Bps),
                    ]
                for kind, number, most in resources:
                    used[kind, number] = used.get((kind, number), 0.0) + rate / most
        if any(part > 1 + SLACK for part in used.values()):
            return False
    for first in rows:
        for other in rows:
            if (
                first is not other
                and schedule.one_to_one
                and first[6] == other[6]
                and (first[0] == other[0] or first[1] == other[1])
            ):
                later, earlier = max(first[3], other[3]), min(first[4], other[4])
                if later < earlier * (1 - SLACK):
                    return False
            if first[7] < other[7] and {first[0], first[1]} & {other[0], other[1]} and other[3] < first[4] * (1 - SLACK):
                return False
    return True


def _cells(*sizes):
    cells = [()]
    for size in sizes:
        cells = [(*cell, at) for cell in cells for at in range(size)]
    return cells
