"""Every course that three members can take, killed between any two messages: each step is committed by all or by none."""

from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise

from aurora.elastic.steps import NOTHING, MemberSteps, Version, settle

NAMES = "abc"
STEPS = 2


def test_who_was_committed_decides_for_all_who_prepared():
    first, second = Version(3, 7), Version(3, 8)
    steps = {"a": MemberSteps(second, None, 3), "b": MemberSteps(first, second, 3), "c": MemberSteps(Version(0, 0))}
    settled = settle(steps)
    assert (settled.version, settled.commits, settled.stale) == (second, {"b"}, {"c"})
    assert settled.applied(4, "b", steps["b"]) == MemberSteps(second, None, 4)
    assert settled.applied(4, "c", steps["c"]) == MemberSteps(NOTHING)


def test_what_nobody_committed_is_discarded_and_a_member_that_missed_it_yields():
    base, lost = Version(3, 7), Version(3, 8)
    settled = settle({"b": MemberSteps(base, lost, 3), "c": MemberSteps(base, lost, 3)})
    assert (settled.version, settled.commits, settled.stale) == (base, frozenset(), frozenset())
    # a member that had committed it comes back after the others have settled: it has missed an epoch
    later = settle({"a": MemberSteps(lost, None, 3), "b": MemberSteps(base, None, 4), "c": MemberSteps(base, lost, 3)})
    assert (later.version, later.commits, later.stale) == (base, frozenset(), {"a"})


@dataclass(frozen=True)
class Node:
    """A member in the model: what it holds, and where in its epoch it is."""

    steps: MemberSteps
    alive: bool = True
    at: str = "waiting"  # or "begun", "working", "voted"
    told: int = 0  # the last epoch that it was told of
    content: tuple = ()  # the ids of the steps that its state has had; what must agree
    pending: tuple = ()


@dataclass(frozen=True)
class World:
    nodes: tuple  # of Node, by name
    epochs: tuple = ()  # (members, who has begun, who has voted, settlement data) of each epoch, by number from 1
    kills: int = 0
    restarts: int = 0
    cut: int = 0  # epochs whose beginning only some heard of


def successors(world, max_kills, max_restarts, max_cuts):
    """Every world that one message, one failure or one decision makes of this one."""
    nodes = dict(zip(NAMES, world.nodes, strict=True))

    def having(epochs=world.epochs, **changes):
        counts = {key: changes.pop(key) for key in ("kills", "restarts", "cut") if key in changes}
        return replace(world, nodes=tuple(changes.get(name, nodes[name]) for name in NAMES), epochs=epochs, **counts)

    living = [name for name in NAMES if nodes[name].alive]
    for name in living:
        node = nodes[name]
        if world.kills < max_kills:  # between any two messages
            dead = replace(node, alive=False, at="dead")
            yield having(**{name: dead}, kills=world.kills + 1)
        members, heard, votes, data = world.epochs[node.told - 1] if node.told else ((), (), (), ())
        broken = any(
            not nodes[other].alive or nodes[other].told > node.told or nodes[other].at == "waiting" for other in members
        )
        if node.at == "begun" and heard == members:  # all connect; who is stale fetches the state from who is not
            settled = settle(dict(data))
            source = next(
                (m for m in members if nodes[m].alive and nodes[m].told == node.told and m not in settled.stale), None
            )
            if name not in settled.stale:
                yield having(**{name: replace(node, at="working")})
            elif source is not None:
                fetched = nodes[source].content[: settled.version.step]
                steps = MemberSteps(settled.version, None, node.told)
                yield having(**{name: replace(node, at="working", steps=steps, content=fetched)})
        if node.at == "working" and node.steps.committed.step < STEPS:  # prepares and votes
            pending = (*node.content, node.told)
            voted = tuple(sorted((*votes, (name, node.steps.committed.step + 1))))
            epochs = (*world.epochs[: node.told - 1], (members, heard, voted, data), *world.epochs[node.told :])
            yield having(epochs, **{name: replace(node, at="voted", steps=node.steps.prepare(), pending=pending)})
        if node.at == "voted" and all((other, node.steps.prepared.step) in votes for other in members):
            yield having(**{name: replace(node, at="working", steps=node.steps.commit(), content=node.pending, pending=())})
        if node.at in ("begun", "working", "voted") and broken:  # it notices, or is told
            yield having(**{name: replace(node, at="waiting")})
    dead = [name for name in NAMES if not nodes[name].alive]
    for name in dead:
        if world.restarts < max_restarts:  # the same name, with nothing but the state that training began with
            yield having(**{name: Node(MemberSteps(Version(0, 0)))}, restarts=world.restarts + 1)
    waiting = [name for name in living if nodes[name].at == "waiting"]
    for members in subsets(waiting):  # others may be cut off, and serve or wait without knowing
        cut_off = set(living) - set(members)
        if cut_off and world.cut >= max_cuts:
            continue
        for heard in subsets(members):  # the lighthouse may be lost while it tells them
            cut = world.cut + bool(cut_off) + (len(heard) < len(members))
            if cut > max_cuts:
                continue
            number = len(world.epochs) + 1
            data = tuple((name, nodes[name].steps) for name in members)
            settled = settle(dict(data))
            if settled.version == NOTHING:
                continue
            told = {}
            for name in heard:
                node = nodes[name]
                content = node.pending if name in settled.commits else node.content
                steps = settled.applied(number, name, node.steps)
                told[name] = replace(
                    node, at="begun", told=number, steps=steps, content=() if name in settled.stale else content, pending=()
                )
            yield having((*world.epochs, (tuple(members), tuple(heard), (), data)), **told, cut=cut)


def subsets(members):
    for mask in range(1, 1 << len(members)):
        yield [name for index, name in enumerate(members) if mask >> index & 1]


def check(world):
    """Members that work in one epoch hold one state; equal versions are equal states; a step that is held was made once."""
    by_version = {}
    for node in world.nodes:
        if not node.alive:
            continue
        for version, content in ((node.steps.committed, node.content), (node.steps.prepared, node.pending)):
            if version not in (None, NOTHING):
                assert len(content) == version.step, world
                assert by_version.setdefault(version, content) == content, world
    for number in {node.told for node in world.nodes if node.alive and node.at in ("working", "voted")}:
        working = [n for n in world.nodes if n.alive and n.told == number and n.at in ("working", "voted")]
        held = {n.steps.committed for n in working} | {n.steps.prepared for n in working if n.steps.prepared}
        assert max(v.step for v in held) - min(v.step for v in held) <= 2, world
        contents = sorted({n.content for n in working}, key=len)
        assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(contents)), world


def explore(kills, restarts, cuts):
    """Returns how many worlds can be reached, and in how many all living members have done all steps.

    kills, restarts: how many members die, and how many of those come back. cuts: how often a member is cut off for an epoch, or the
    lighthouse is lost while it tells the members of one.
    """
    start = World(tuple(Node(MemberSteps(Version(0, 0))) for _ in NAMES))
    seen, queue, ends = {start}, deque([start]), 0
    while queue:
        world = queue.popleft()
        check(world)
        following = list(successors(world, kills, restarts, cuts))
        done = [node for node in world.nodes if node.alive]
        if done and all(node.steps.committed.step == STEPS and node.told == len(world.epochs) for node in done):
            ends += 1
            assert len({node.content for node in done}) == 1, world
        for each in following:
            if each not in seen:
                seen.add(each)
                queue.append(each)
    return len(seen), ends


def test_every_course_ends_with_one_state():
    worlds, ends = explore(kills=1, restarts=1, cuts=0)  # bench/quorum.py explores more
    assert worlds > 5000
    assert ends > 300
