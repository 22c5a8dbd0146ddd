"""Training on ranks that are threads: the same losses as one process with plain transformers and AdamW, whatever the ranks."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from aurora.algorithms.alltoall.registry import ORDER
from aurora.models.own_weights import load_without_experts
from aurora.moe.expert_map import ExpertMap
from aurora.runtime.distributed.launcher import launch_threads
from aurora.runtime.transports.ordered import Memory, MemoryTransport
from aurora.training.data import GlobalBatches
from aurora.training.expert_parallel import ExpertParallel
from aurora.training.loss import Float64Throughout
from aurora.training.state import TrainedParameter, optimizer_dtype, sum_over_holders, untrained
from aurora.training.trainer import Trainer
from aurora.types import Cluster, Gpu, Network, Placement, TrainOptions
from tests.models.architectures import build, load_plain

STEPS, BATCH, LENGTH = 4, 5, 12
OPTIONS = TrainOptions(batch=BATCH, length=LENGTH, dtype="float64", learning_rate=3e-3, max_norm=0.5, router_loss=0.02)


def every_order(ranks):
    return ORDER["openshop"](1 - np.eye(ranks, dtype=np.int64), Network.equal(ranks), rng=np.random.default_rng(0))


ONE_RANK = every_order(1)


def batches():
    return GlobalBatches(np.random.default_rng(0).integers(3, 259, (7, LENGTH)), BATCH, 1)


def router_loss(logits_L, experts, top_k):
    """E sum_e f_e P_e over the tokens of all layers."""
    chance_NE = torch.cat(logits_L).softmax(dim=-1)
    chosen_NE = torch.zeros_like(chance_NE).scatter_(1, chance_NE.topk(top_k).indices, 1.0)
    return experts * (chosen_NE.mean(dim=0) * chance_NE.mean(dim=0)).sum()


def plain(folder, options=OPTIONS, steps=STEPS):
    """Losses and gradient norms of one process with transformers and torch alone."""
    model = load_plain(folder, dtype=torch.float64, experts_implementation="eager").eval()
    adam = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    found, data, router = [], batches(), None
    for step in range(steps):
        tokens = torch.from_numpy(data.of(step))
        with Float64Throughout():
            out = model(input_ids=tokens, output_router_logits=True, use_cache=False)
        loss = cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        router = router_loss(out.router_logits, *sizes(model.config))
        assert math.isclose(router.item(), out.aux_loss.item(), rel_tol=1e-6)
        adam.zero_grad()
        (loss + options.router_loss * router).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        adam.step()
        found.append((loss.item(), router.item(), norm.item()))
    return np.array(found), model


def sizes(config):
    return getattr(config, "num_local_experts", None) or config.num_experts, config.num_experts_per_tok


def cluster(ranks):
    return Cluster("test", tuple(Gpu(f"g{rank}", "cpu", rank, 1e9, 1e9, 1) for rank in range(ranks)))


def joined(rank_info, memory, folder, options, **named):
    """A rank's trainer, which has met the others."""
    trainer = Trainer(load_without_experts(folder, dtype=optimizer_dtype(options)), batches(), options, **named)
    transport = MemoryTransport(memory, rank_info.rank)
    transport.gather(torch.zeros(1, dtype=torch.uint8))  # transformers changes the default dtype while another thread loads
    trainer.join(transport, cluster(rank_info.ranks))
    return trainer


def trained(rank_info, memory, folder, placements, options, steps):
    """Losses, router losses and norms of each step; experts are as `placements` says from these steps on."""
    trainer = joined(rank_info, memory, folder, options)
    found = []
    for step in range(steps):
        if step in placements:
            trainer.place(placements[step] or trainer.planned())
        prepared = trainer.prepare()
        trainer.commit(prepared)
        found.append((prepared.loss, prepared.router_loss, prepared.gradient_norm))
    return np.array(found), trainer


def on_threads(folder, ranks, placements, options=OPTIONS, steps=STEPS):
    return launch_threads(trained, ranks, Memory(ranks, 60.0), folder, placements, options, steps, timeout_s=60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("mixtral", tmp_path_factory.mktemp("training") / "mixtral", torch.float64)


@pytest.fixture(scope="module")
def alone(folder):
    return plain(folder)


LAYERS = 4
UNEVEN = Placement((((0, 1, 2), (2, 3), (0, 3, 4)),) * LAYERS, (((0.9, 1.0, 0.25), (0.75, 0.5), (0.1, 0.5, 1.0)),) * LAYERS)
OTHER = Placement.evenly((((0, 1), (2, 3, 4), (0, 4)),) * LAYERS)


@pytest.mark.parametrize(
    ("ranks", "placements", "min_replicas"),
    [(1, {0: None}, 1), (2, {0: None}, 1), (3, {0: UNEVEN}, 1), (3, {0: OTHER, 2: UNEVEN, 3: None}, 2), (4, {0: None}, 3)],
)
def test_losses_and_weights_do_not_depend_on_the_ranks(folder, alone, ranks, placements, min_replicas):
    expected, model = alone
    results = on_threads(folder, ranks, placements, replace(OPTIONS, min_replicas=min_replicas))
    assert_replicas_are_the_same([trainer for _, trainer in results])
    for found, trainer in results:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
        weights = dict(model.named_parameters())
        for name, trained_parameter in trainer.state.dense.items():
            torch.testing.assert_close(trained_parameter.weights, weights[name], rtol=0, atol=1e-9)
        for number, (name, named) in enumerate(zip(trainer.state.names_L, trainer.state.experts_L, strict=True)):
            held = trainer.state.layers[number].held
            for parameter, each in named.items():
                torch.testing.assert_close(each.weights, weights[f"{name}.{parameter}"][list(held)], rtol=0, atol=1e-9)


def assert_replicas_are_the_same(trainers):
    """Bit by bit, with what the optimizer keeps."""
    placement = trainers[0].placement
    for layer, slots_G in enumerate(placement.slots_LG):
        for expert in range(placement.experts):
            first, *others = (trainers[rank].state.expert(layer, expert) for rank, held in enumerate(slots_G) if expert in held)
            assert all(torch.equal(other[name], first[name]) for other in others for name in first)
    first, *others = (trainer.state.dense for trainer in trainers)
    assert all(torch.equal(other[name].state, first[name].state) for other in others for name in first)


def test_experts_move_for_more_than_chance_and_if_that_pays(folder, alone):
    alike, hot, other = ((0.4, 2 / 15, 0.1, 0.1, 4 / 15), (0.8, 0.05, 0.05, 0.05, 0.05), (0.05, 0.05, 0.8, 0.05, 0.05))

    def one(rank_info, memory):
        now_s = itertools.count(step=1000.0)  # so long takes a step, and a move
        trainer = joined(rank_info, memory, folder, replace(OPTIONS, min_replicas=1), clock=lambda: next(now_s))
        trainer.place(OTHER)
        rng, moved = np.random.default_rng(0), []
        for share_E in (*[alike] * 5, hot, hot, other):  # OTHER divides the first equally
            for layer in trainer.state.layers:
                layer.tokens_E += rng.multinomial(300, share_E)
            moved.append(trainer.rebalance())
        first = trainer.prepare()
        trainer.commit(first)
        return moved, [first.loss, trainer.prepare().loss], trainer.placement

    for moved, losses, placement in launch_threads(one, 3, Memory(3, 60.0), timeout_s=60.0):
        assert [each > 0 for each in moved] == [False] * 5 + [True] + [False] * 2, "the last would take longer than all windows"
        assert all(0 in held for layer in placement.slots_LG for held in layer)
        np.testing.assert_allclose(losses, alone[0][:2, 0], rtol=0, atol=1e-9)


def test_bfloat16_computes_near_float32_and_keeps_replicas_the_same(folder):
    options = replace(OPTIONS, max_norm=None, router_loss=0.0)
    exact, rounded = (on_threads(folder, 2, {0: None}, replace(options, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    np.testing.assert_allclose(rounded[0][0], exact[0][0], rtol=0.05)
    assert_replicas_are_the_same([trainer for _, trainer in rounded])


def test_biases_and_transposed_weights_train_alike_on_one_rank_and_on_two(tmp_path):
    folder, options = build("gpt_oss", tmp_path / "gpt_oss"), replace(OPTIONS, dtype="float32", router_loss=None)
    (alone, _), (found, _) = (on_threads(folder, ranks, {0: None}, options, steps=2)[0] for ranks in (1, 2))
    np.testing.assert_allclose(found, alone, rtol=1e-4)


def test_a_discarded_step_leaves_no_trace(folder, alone):
    def one(rank_info, memory):
        trainer = joined(rank_info, memory, folder, OPTIONS)
        trainer.place(trainer.planned())
        trainer.prepare()
        trainer.discard()
        prepared = trainer.prepare()
        trainer.commit(prepared)
        return prepared, trainer.prepare()

    ((first, second),) = launch_threads(one, 1, Memory(1, 60.0), timeout_s=60.0)
    assert (first.step, second.step) == (0, 1)
    np.testing.assert_allclose([first.loss, second.loss], alone[0][:2, 0], rtol=0, atol=1e-9)


def test_the_gradient_of_a_layer_is_that_of_its_outputs():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts = 3
            self.scale = nn.Parameter(torch.rand(3, 4, dtype=torch.float64))

        def forward(self, rows, index, weights):
            return torch.tanh(rows * self.scale[index[:, 0]]) * weights

    torch.manual_seed(0)
    layer = ExpertParallel(Experts())
    slots_G = ((0, 1, 2),)
    layer.serve(slots_G, ExpertMap(slots_G, 0), ONE_RANK, MemoryTransport(Memory(1, 60.0), 0))
    index = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0]])

    def outputs(hidden, weights, scale):
        layer.local.scale.data = scale.detach()
        return functional_call(layer, {"local.scale": scale}, (hidden, index, weights))

    inputs = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 4), (4, 2), (3, 4))]
    assert torch.autograd.gradcheck(outputs, inputs)


def test_gradients_are_summed_over_those_who_hold_the_weights():
    sizes = {(0, 1, 2): 7, (0, 2): 5, (1,): 3, (1, 2): 1}
    given = [
        {holders: torch.rand(size, dtype=torch.float64) for holders, size in sizes.items() if rank in holders}
        for rank in range(3)
    ]

    def one(rank_info, memory):
        flats = {holders: flat.clone() for holders, flat in given[rank_info.rank].items()}
        squares = sum_over_holders(MemoryTransport(memory, rank_info.rank), every_order(3), flats)
        return flats, squares

    results = launch_threads(one, 3, Memory(3, 60.0), timeout_s=60.0)
    expected = {holders: sum(given[rank][holders] for rank in holders) for holders in sizes}
    for flats, _ in results:
        assert all(torch.equal(flat, expected[holders]) for holders, flat in flats.items())
    assert math.isclose(sum(squares for _, squares in results), sum(float(each.square().sum()) for each in expected.values()))


def test_a_global_batch_is_the_same_samples_on_any_ranks():
    samples_NT = np.arange(7)[:, None] * np.ones(3, dtype=np.int64)
    data = GlobalBatches(samples_NT, 5, seed=3)
    steps = [data.of(step)[:, 0].tolist() for step in range(7)]
    for step, expected in enumerate(steps):
        for ranks in (1, 2, 3, 5):
            assert np.concatenate([data.of(step, rank, ranks) for rank in range(ranks)])[:, 0].tolist() == expected
    drawn = np.concatenate(steps).reshape(5, 7)
    assert all(sorted(each) == list(range(7)) for each in drawn.tolist())
    assert len({tuple(each) for each in drawn.tolist()}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_was_broken_off_does_not_shape_later_gradients(dtype):
    parameter = nn.Parameter(torch.ones(1, 3))
    trained = TrainedParameter(parameter, dtype)
    broken_off = (parameter * 2).sum()  # its graph stays, as a traceback's frames would keep it
    trained.hold(untrained(torch.ones(2, 3)))
    (parameter * torch.tensor([[1.0], [2.0]], dtype=dtype)).sum().backward()
    trained.take_gradient()
    assert trained.gradient.tolist() == [[1.0] * 3, [2.0] * 3]
    assert broken_off.item() == 6
