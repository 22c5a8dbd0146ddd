"""State that a rank trains: its weights with their AdamW state, and sums of gradients between ranks.

Weights outside experts are on all ranks, an expert's weights on the ranks of its replicas.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from aurora.models.loading import MoeModel, expert_parameters
from aurora.moe.transport import Transport
from aurora.training.expert_parallel import ExpertParallel
from aurora.types import Order, Placement, TrainOptions

Holders = tuple[int, ...]  # ranks that hold the same weights, ascending


def exchange_tensors(
    transport: Transport,
    order: Order,
    outgoing_R: Sequence[Sequence[torch.Tensor]],
    like_R: Sequence[Sequence[torch.Tensor]],
    empty: torch.Tensor,
) -> list[list[torch.Tensor]]:
    """Sends tensors to other ranks, and returns the tensors received from each. A collective call: all ranks make it.

    Args:
        transport: carries the messages.
        order: the order of the messages.
        outgoing_R: for each rank, the tensors to send to it; empty for this rank.
        like_R: for each rank, tensors with the shapes of those that it sends; empty for this rank.
        empty: any tensor with the dtype and device of all tensors.

    Returns:
        For each rank, the tensors received from it (views of one message).

    Raises:
        RankFailed: if a rank is lost.
    """
    sends = [torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else empty.new_empty(0) for tensors in outgoing_R]
    sizes_R = [[like.numel() for like in likes] for likes in like_R]
    recvs = [empty.new_empty(sum(sizes)) for sizes in sizes_R]
    transport.exchange(order, sends, recvs, lambda *_: None)
    transport.wait()
    return [
        [part.view(like.shape) for part, like in zip(message.split_with_sizes(sizes), likes, strict=True)]
        for message, sizes, likes in zip(recvs, sizes_R, like_R, strict=True)
    ]


def sum_over_holders(transport: Transport, order: Order, flats: Mapping[Holders, torch.Tensor]) -> float:
    """Replaces each gradient by its sum over the ranks that hold the weights, bit for bit the same on all of them.

    It is a reduce-scatter plus all-gather by two all-to-alls. In the first, each holder receives one part of the gradient from
    all other holders, and sums it in rank order. In the second it sends the sum to the others. A collective call.

    Args:
        transport: carries tensors between the ranks.
        order: the order of the first all-to-all; the second is in the reversed order.
        flats: for each set of holders that contains this rank, the gradients (X,) of all weights that exactly these ranks hold,
            of one dtype; overwritten by the sums.

    Returns:
        Sum of squares of the parts that this rank has summed; added up over all ranks, each weight counts once.
    """
    rank, ranks = transport.rank, transport.ranks
    parts = {holders: flats[holders].tensor_split(len(holders)) for holders in sorted(flats)}  # views: one for each holder
    shared_R = [[holders for holders in parts if peer in holders and peer != rank] for peer in range(ranks)]
    theirs_R = [[parts[holders][holders.index(peer)] for holders in shared] for peer, shared in enumerate(shared_R)]
    mine_R = [[parts[holders][holders.index(rank)] for holders in shared] for shared in shared_R]
    empty = next(iter(flats.values()))
    arrived_R = exchange_tensors(transport, order, theirs_R, mine_R, empty)
    parts_of_R = [dict(zip(shared, arrived, strict=True)) for shared, arrived in zip(shared_R, arrived_R, strict=True)]
    squares = 0.0
    for holders, views in parts.items():
        mine = views[holders.index(rank)]
        first, *others = (mine.clone() if peer == rank else parts_of_R[peer][holders] for peer in holders)
        for other in others:
            first += other
        mine.copy_(first)
        squares += float(mine.double().square().sum())
    totals_R = exchange_tensors(transport, order.reversed, mine_R, theirs_R, empty)
    for theirs, totals in zip(theirs_R, totals_R, strict=True):
        for part, total in zip(theirs, totals, strict=True):
            part.copy_(total)
    return squares


ExpertState = Mapping[str, torch.Tensor]  # of one expert: by parameter name its state, see TrainedParameter


class TrainedParameter:
    """Model parameter with its training state, (3, *shape): weights, AdamW's mean gradient, and mean squared gradient.

    Args:
        parameter: the model's parameter, in the dtype of the state.
        compute_dtype: dtype in which the model computes from now on.

    Attributes:
        state: the state; `hold` replaces it.
        weights: the optimizer's parameter, a view of `state`; with equal dtypes, it is the model's parameter itself.
    """

    def __init__(self, parameter: nn.Parameter, compute_dtype: torch.dtype) -> None:
        self._parameter, self._compute_dtype = parameter.requires_grad_(), compute_dtype
        self.weights = parameter if parameter.dtype == compute_dtype else nn.Parameter(parameter.detach())
        self.hold(untrained(parameter.detach()))

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient that the optimizer will use."""
        assert self.weights.grad is not None, "gradients are summed before a step"
        return self.weights.grad

    def hold(self, state: torch.Tensor) -> None:
        """Replaces the state by `state`, whose shape may differ."""
        self.state = state
        for parameter in (self.weights, self._parameter):
            # Of another dtype, so that torch forgets the shape that it expects of the gradient. It would keep it while anything
            # holds the graph of a step that was broken off, and sum gradients of more slots to that shape.
            parameter.data = parameter.new_empty(0, dtype=torch.complex64)
        self.weights.data = state[0]
        self.round()

    def round(self) -> None:
        """Copies the optimizer's weights to the model, rounded to the model's dtype."""
        if self._parameter is not self.weights:
            self._parameter.data = self.state[0].to(self._compute_dtype)

    def take_gradient(self) -> None:
        """Moves the model's gradient to the optimizer; zeros if the model has none."""
        gradient, self._parameter.grad = self._parameter.grad, None
        self.weights.grad = torch.zeros_like(self.weights) if gradient is None else gradient.to(self.weights.dtype)

    def forget_gradient(self) -> None:
        """Clears the gradient."""
        self.weights.grad = self._parameter.grad = None


def untrained(weights: torch.Tensor) -> torch.Tensor:
    """Returns the initial training state (3, *shape) of weights, before the first step."""
    state = weights.new_zeros((3, *weights.shape))
    state[0] = weights
    return state


def optimizer_dtype(options: TrainOptions) -> torch.dtype:
    """Returns the dtype of the training state: the model's compute dtype, but at least float32."""
    return torch.float64 if options.dtype == "float64" else torch.float32


class TrainState:
    """Weights that this rank trains, with their AdamW state.

    Args:
        model: a model of `load_without_experts`, in `optimizer_dtype`. Its MoE layers' experts modules are replaced.
        options: dtype, learning rate and weight decay.

    Attributes:
        layers: the MoE layers.
        names_L: the name of each layer's experts module in the model.
        dense: the parameters outside experts, by name.
        experts_L: for each layer, the parameters of its experts by name; the second axis of their states is the slot.
        steps: number of steps taken.
    """

    def __init__(self, model: MoeModel, options: TrainOptions) -> None:
        compute_dtype = getattr(torch, options.dtype)
        modules_L = [layer.experts for layer in model.layers]
        name_of = {id(module): name for name, module in model.model.named_modules()}
        self.names_L = [name_of[id(module)] for module in modules_L]
        of_experts = {id(parameter) for module in modules_L for _, parameter in expert_parameters(module)}
        self.dense = {
            name: TrainedParameter(parameter, compute_dtype)
            for name, parameter in model.model.named_parameters()
            if id(parameter) not in of_experts
        }
        self.experts_L = [
            {name: TrainedParameter(parameter, compute_dtype) for name, parameter in expert_parameters(module)}
            for module in modules_L
        ]
        self.layers = [ExpertParallel(module) for module in modules_L]
        self._dropped_L: list[dict[int, ExpertState]] = [{} for _ in self.layers]  # since the last step
        for layer, trained in zip(model.layers, self.layers, strict=True):
            setattr(layer.block, layer.name, trained)
        weights = [trained.weights for trained in self.parameters()]
        self._adam = torch.optim.AdamW(weights, options.learning_rate, weight_decay=options.weight_decay)
        self.continue_after(0)

    def parameters(self) -> Iterator[TrainedParameter]:
        """Yields all parameters, those outside experts first."""
        yield from self.dense.values()
        for named in self.experts_L:
            yield from named.values()

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's state: three times the bytes of its weights in the state's dtype."""
        return sum(like.nbytes for like in self.likes(0).values())

    def likes(self, layer: int) -> dict[str, torch.Tensor]:
        """Returns uninitialised tensors with the shapes of one expert's state, by parameter name."""
        return {name: trained.state.new_empty((3, *trained.state.shape[2:])) for name, trained in self.experts_L[layer].items()}

    def expert(self, layer: int, expert: int) -> ExpertState:
        """Returns the state of an expert that this rank holds, as views by parameter name."""
        slot = self.layers[layer].held.index(expert)
        return {name: trained.state[:, slot] for name, trained in self.experts_L[layer].items()}

    def hold(self, layer: int, wanted: Sequence[int], arrived: Mapping[int, ExpertState]) -> None:
        """Replaces this rank's experts of a layer by `wanted`; `continue_after` must be called afterwards.

        Dropped experts stay in memory until the next step; see `take_back`.

        Args:
            layer: index of the MoE layer.
            wanted: the expert of each slot.
            arrived: states of experts not held so far. Before the first step, missing ones are read from the model's files.
        """
        module = self.layers[layer]
        if tuple(wanted) == module.held:
            return
        lacking = [expert for expert in wanted if expert not in module.held and expert not in arrived]
        assert not lacking or not self.steps, "the model's files have experts as they were before the first step"
        read = module.reader.read(lacking) if lacking else {}
        states = {**arrived, **{expert: {name: untrained(tensor) for name, tensor in read[expert].items()} for expert in read}}
        dropped = {expert: self.expert(layer, expert) for expert in module.held if expert not in wanted}
        self._dropped_L[layer] = {**self._dropped_L[layer], **dropped}
        for name, trained in self.experts_L[layer].items():
            state_of = dict(zip(module.held, trained.state.unbind(1), strict=True))
            parts = [states[expert][name] if expert in states else state_of[expert] for expert in wanted]
            trained.hold(torch.stack(parts, dim=1) if parts else trained.state[:, :0].clone())
        module.held, module.local.num_experts = tuple(wanted), len(wanted)

    def take_back(self) -> None:
        """Restores all experts that were dropped since the last step, in case other ranks did not receive them.

        `continue_after` must be called afterwards.
        """
        for number, (layer, dropped) in enumerate(zip(self.layers, self._dropped_L, strict=True)):
            self.hold(number, (*layer.held, *(expert for expert in dropped if expert not in layer.held)), dropped)

    def forget_experts(self) -> None:
        """Drops all experts, also those kept for `take_back`. `continue_after` must be called afterwards."""
        for number in range(len(self.layers)):
            self.hold(number, (), {})
            self._dropped_L[number] = {}

    def continue_after(self, steps: int) -> None:
        """Rebuilds the optimizer on the present states of the parameters, to which `steps` steps have been applied."""
        self.steps = steps
        self._adam.state.clear()
        for trained in self.parameters():
            _, mean, square_mean = trained.state
            self._adam.state[trained.weights] = {
                "step": torch.tensor(steps, dtype=torch.float32), "exp_avg": mean, "exp_avg_sq": square_mean
            }  # fmt: skip

    def sum_gradients(self, placement: Placement, order: Order, transport: Transport) -> float:
        """Moves the model's gradients to the optimizer, summed over the ranks that hold each weight. A collective call.

        Args:
            placement: the experts of each rank.
            order: the order of the first all-to-all, see `sum_over_holders`.
            transport: carries gradients between the ranks.

        Returns:
            This rank's share of the gradient's sum of squares; added up over all ranks, each weight counts once.
        """
        for trained in self.parameters():
            trained.take_gradient()
        views: dict[Holders, list[torch.Tensor]] = {
            tuple(range(transport.ranks)): [trained.gradient for trained in self.dense.values()]
        }
        for number, named in enumerate(self.experts_L):
            holds_EG = placement.holds_EG(number)
            for slot, expert in enumerate(self.layers[number].held):
                holders = tuple(np.flatnonzero(holds_EG[expert]).tolist())
                views.setdefault(holders, []).extend(trained.gradient[slot] for trained in named.values())
        flats = {holders: torch.cat([view.reshape(-1) for view in parts]) for holders, parts in views.items()}
        squares = sum_over_holders(transport, order, flats)
        for holders, parts in views.items():
            for view, total in zip(parts, flats[holders].split_with_sizes([view.numel() for view in parts]), strict=True):
                view.copy_(total.view(view.shape))
        return squares

    @property
    def weights_X(self) -> torch.Tensor:
        """(X,) copy of all weights that this rank holds, concatenated in the sequence of `parameters`."""
        return torch.cat([trained.weights.detach().reshape(-1) for trained in self.parameters()])

    def take_gradient(self, gradient_X: torch.Tensor) -> None:
        """Sets the optimizer's gradient from one vector (X,), in the sequence of `weights_X`."""
        parameters = list(self.parameters())
        sizes = [trained.weights.numel() for trained in parameters]
        for trained, gradient in zip(parameters, gradient_X.split_with_sizes(sizes), strict=True):
            trained.weights.grad = gradient.to(trained.weights).view(trained.weights.shape)

    def step(self, scale: float) -> None:
        """Takes one AdamW step with the summed gradients times `scale`."""
        self._dropped_L = [{} for _ in self.layers]
        for trained in self.parameters():
            trained.gradient.mul_(scale)
        self._adam.step()
        for trained in self.parameters():
            trained.forget_gradient()
            trained.round()
        self.steps += 1

    def forget_gradients(self) -> None:
        """Clears all gradients, so that a step can be prepared again."""
        for trained in self.parameters():
            trained.forget_gradient()
