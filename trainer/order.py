# SPDX-License-Identifier: Apache-2.0
"""B3: a member computes on the parameters that it has, while the others are on their way.

    wait      each module waits, as it is called, until the fragments with its parameters are there
    order     what needs only the set that the member pulls from the servers comes as early as its inputs allow

The order is fixed by that set, never by what has arrived: autograd adds gradients at a fork in the order of computing.
So all bits are those of a member that has everything before it begins. Nodes that draw random numbers keep their order.
So do nodes of which one changes what the other one reads: BatchNorm's statistics, a tensor that is changed in place.
Which nodes these are is seen as the job is prepared, in one step on two samples.
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from nicps import client
from trainer import weights
from trainer.branches import leaves, needs_of, trace
from trainer.errors import JobError, Untraceable
from trainer.flat import FlatModel
from trainer.packing import FRAGMENT, fragments

Fragments = tuple[range, ...]
Wait = Callable[[Fragments], None]
"""Returns when these fragments are there, and their numbers are in the model's tensors."""
Build = Callable[[], nn.Module]
Run = Callable[[nn.Module], Tensor]
"""The loss of a model on some samples."""
Outcome = dict[str, Tensor]

_RANDOM = "the random numbers"


class Differs(JobError):
    """The model computes something else where it waits for its parameters."""


class Arrivals:
    """Waits for each fragment once a step: later it may hold what modules have changed meanwhile, such as statistics.

    Args:
        count: of all fragments.
    """

    def __init__(self, count: int, wait: Wait) -> None:
        self._here = np.zeros(count, bool)
        self._wait = wait

    def begin(self) -> None:
        """A step begins: nothing is there."""
        self._here[:] = False

    def end(self) -> None:
        """Everything is there, or nothing is waited for any more."""
        self._here[:] = True

    def require_all(self) -> None:
        """Wait also for the fragments that no module has needed."""
        self.require((range(len(self._here)),))

    def require(self, pieces: Fragments) -> None:
        """Wait for those of the fragments that are not there yet."""
        missing: list[range] = []
        for piece in pieces:
            at = np.flatnonzero(~self._here[piece.start : piece.stop]) + piece.start
            for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
                if len(run):
                    missing.append(range(int(run[0]), int(run[-1]) + 1))
        if missing:
            self._wait(tuple(missing))
            for piece in missing:
                self._here[piece.start : piece.stop] = True


class Traced:
    """A model's forward pass as a graph, for all models that are built alike.

    Attributes: `graph`; `constants`, tensors that it has made on its way, by name.
    """

    def __init__(self, build: Build) -> None:
        """Trace a model that is built for it, as tracing may change it.

        Raises:
            Untraceable: it cannot be traced.
        """
        model = build()
        own = set(vars(model))
        self.graph = trace(model)
        self.constants = {
            name: value
            for name, value in vars(model).items()
            if name not in own and isinstance(value, Tensor)
        }
        self._needs = needs_of(model, self.graph)
        self._before = {node: set(node.all_input_nodes) for node in self.graph.nodes}
        *others, output = self.graph.nodes
        self._before[output].update(others)

    def learn(self, build: Build, run: Run, seed: int) -> None:
        """See which nodes must keep their order, in a training step.

        Raises:
            Untraceable: the graph computes something else than the model does.
        """
        due = train(build(), run, seed)
        model = build()
        _Recorder(model, self, self._before)
        try:
            found = train(model, run, seed)
        except JobError as error:
            raise Untraceable(f"as torch.fx has traced it, the model fails: {error}") from error
        if differs := difference(due, found):
            raise Untraceable(f"as torch.fx has traced it, the model computes another {differs}")

    def order(self, late: Iterable[str]) -> list[str]:
        """The names of all nodes, each as early as it can be; those that read one of the tensors `late` come later.

        Of two that can come next, the one that was first is first.
        """
        slow = frozenset(late)
        nodes = list(self.graph.nodes)
        key = {node: (not slow.isdisjoint(self._needs[node]), at) for at, node in enumerate(nodes)}
        missing = {node: len(before) for node, before in self._before.items()}
        after: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        for node, before in self._before.items():
            for earlier in before:
                after[earlier].append(node)
        ready = [key[node] for node in nodes if not missing[node]]
        found: list[str] = []
        while ready:
            node = nodes[heapq.heappop(ready)[1]]
            found.append(node.name)
            for later in after[node]:
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(ready, key[later])
        return found

    def in_order(self, names: Sequence[str]) -> fx.Graph:
        """The graph with its nodes in that order.

        Raises:
            JobError: these are not its nodes.
        """
        nodes = {node.name: node for node in self.graph.nodes}
        if sorted(nodes) != sorted(names):
            raise JobError("the model differs from the one handed out: its forward pass is another")
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for name in names:
            copies[nodes[name]] = graph.node_copy(nodes[name], copies.__getitem__)
        return graph


class Forward(fx.Interpreter):
    """The forward pass of a model that trains, node by node. In tests the model computes as it is written."""

    def __init__(
        self, model: nn.Module, graph: fx.Graph, constants: dict[str, Tensor], keep: bool = False
    ) -> None:
        super().__init__(model, garbage_collect_values=not keep, graph=graph)
        self.extra_traceback = False
        self._constants = constants
        self._plain = model.forward
        self._signature = inspect.signature(model.forward)
        self.require: dict[str, Callable[[], None]] = {}  # what to do before a tensor is read
        model.forward = self.forward

    def follow(self, graph: fx.Graph) -> None:
        """From now on the nodes run in that order."""
        super().__init__(self.module, graph=graph)
        self.extra_traceback = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training:
            return self._plain(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        try:
            return self.run(*bound.args, *bound.kwargs.values())
        finally:
            self.env = {}  # the activations

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self._constants:
            return self._constants[target]
        if target in self.require:
            self.require[target]()
        return super().get_attr(target, args, kwargs)


class _Recorder(Forward):
    """Notes which nodes draw random numbers, and which change a tensor that others read."""

    def __init__(
        self, model: nn.Module, traced: Traced, before: dict[fx.Node, set[fx.Node]]
    ) -> None:
        super().__init__(model, traced.graph, traced.constants, keep=True)
        self._before = before
        self._writer: dict[object, fx.Node] = {}
        self._readers: dict[object, set[fx.Node]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._writer.clear()
        self._readers.clear()
        return super().forward(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        tensors = [
            leaf
            for leaf in tree_leaves(self.fetch_args_kwargs_from_env(n))
            if isinstance(leaf, Tensor)
        ]
        if n.op == "call_module":
            module = self.module.get_submodule(str(n.target))
            tensors += [*module.parameters(), *module.buffers()]
        versions = [tensor._version for tensor in tensors]
        random = torch.get_rng_state()
        value = super().run_node(n)
        # Values are kept, so a storage's address is its own throughout the pass.
        places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        written: set[object] = {
            place
            for place, tensor, version in zip(places, tensors, versions, strict=True)
            if tensor._version != version
        }
        if not torch.equal(random, torch.get_rng_state()):
            written.add(_RANDOM)
        for what in {*places, *written}:
            if what in self._writer:
                self._before[n].add(self._writer[what])
        for what in written:
            self._before[n] |= self._readers.pop(what, set())
            self._writer[what] = n
        for place in places:
            self._readers.setdefault(place, set()).add(n)
        self._before[n].discard(n)
        return value


def attach(
    model: nn.Module,
    layout: weights.Layout,
    require: Callable[[Fragments], None],
    traced: Traced | None = None,
    order: Sequence[str] = (),
) -> Forward | None:
    """Let the model wait for the fragments of its modules' parameters and buffers, and compute in that order.

    Args:
        layout: of the round's vector.
        require: is called before they are read, such as `Arrivals.require`.
        traced, order: how a model that is built alike was traced, and the names of its nodes. Without them the model
            computes as it is written.

    Returns:
        What runs the traced model, which can `follow` another order.
    """
    places = fragments(layout)
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}

    def waiting(tensors: Iterable[Tensor]) -> Callable[..., None] | None:
        held = (names.get(id(tensor), "") for tensor in tensors)
        pieces = joined(places[name] for name in held if name in places)
        return (lambda *_: require(pieces)) if pieces else None

    whole = leaves(model)
    for module in whole.values():
        if hook := waiting((*module.parameters(), *module.buffers())):
            module.register_forward_pre_hook(hook)
    if traced is None:
        for name, module in model.named_modules():
            if not any(name == leaf or name.startswith(f"{leaf}.") for leaf in whole):
                if hook := waiting(_directly(module)):
                    module.register_forward_pre_hook(hook)
        return None
    forward = Forward(model, traced.in_order(order), traced.constants)
    for node in traced.graph.nodes:
        if node.op == "get_attr" and node.target not in traced.constants:
            if hook := waiting((forward.fetch_attr(str(node.target)),)):
                forward.require[str(node.target)] = hook
    return forward


def _directly(module: nn.Module) -> Iterator[Tensor]:
    """What the module itself holds, and lists of parameters in it."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from child.parameters()


def joined(pieces: Iterable[range]) -> Fragments:
    """The same fragments, in order, in as few ranges as there can be."""
    found: list[range] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if found and piece.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, piece.stop))
        else:
            found.append(piece)
    return tuple(found)


def late(layout: weights.Layout, sets: Sequence[int], first: int) -> set[str]:
    """The tensors that a member which pulls set `first` from the servers gets from its partner, at least in part."""
    begins = client.second_begins(sets)
    return {
        name
        for name, place in fragments(layout).items()
        if (place.stop > begins if first == 1 else place.start < begins)
    }


def orders_of(
    build: Build, run: Run, layout: weights.Layout, sets: Sequence[int], seed: int
) -> list[list[str]]:
    """For each set the names of the model's nodes, in the order of a member that pulls it from the servers.

    Args:
        layout, sets: as in prepared.json.

    Raises:
        Untraceable: the model cannot be traced. It can compute as it is written.
        JobError: in one of the orders something else would come out.
    """
    traced = Traced(build)
    traced.learn(build, run, seed)
    orders = [traced.order(late(layout, sets, first)) for first in (1, 2)]
    for order in orders:
        verify(build, run, layout, seed, traced, order)
    return orders


def verify(
    build: Build,
    run: Run,
    layout: weights.Layout,
    seed: int,
    traced: Traced | None = None,
    order: Sequence[str] = (),
) -> None:
    """Train a step with parameters that are NaN until they are waited for.

    Raises:
        Differs: something else comes out than without waiting; or, beside gradients, than in the model's own order.
    """

    def flat() -> FlatModel:
        return FlatModel(build(), weights.averaged(layout), weights.order(layout))

    there, coming = flat(), flat()
    attach(there.model, layout, lambda pieces: None, traced, order)
    due = train(there.model, run, seed)
    if differs := difference(train(build(), run, seed), due, gradients=False):
        raise Differs(f"in the order of its branches the model computes another {differs}")
    real = coming.weights.copy()

    def arrive(pieces: Fragments) -> None:
        for piece in pieces:
            lanes = slice(piece.start * FRAGMENT, piece.stop * FRAGMENT)
            coming.weights[lanes] = real[lanes]

    arrivals = Arrivals(-(-coming.lanes // FRAGMENT), arrive)
    attach(coming.model, layout, arrivals.require, traced, order)
    coming.weights[:] = np.nan
    if differs := difference(due, train(coming.model, run, seed)):
        raise Differs(
            f"the model reads parameters before the module that holds them is called (another {differs} comes out): "
            "such a model cannot have partners"
        )


def train(model: nn.Module, run: Run, seed: int) -> Outcome:
    """What a training step on the samples of `run` comes to: the loss, gradients, buffers, and random numbers."""
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    loss = run(model)
    loss.backward()  # type: ignore[no-untyped-call]
    buffers = {f"buffer {name!r}": buffer.clone() for name, buffer in model.named_buffers()}
    gradients = {
        f"gradient of {name!r}": parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {
        "loss": loss.detach(),
        **buffers,
        **gradients,
        "state of random numbers": torch.get_rng_state(),
    }


def difference(one: Outcome, other: Outcome, *, gradients: bool = True) -> str | None:
    """The first thing that has not the same bits in both, or is not in both."""
    for name in {**one, **other}:
        if gradients or not name.startswith("gradient"):
            if name not in one or name not in other or not _alike(one[name], other[name]):
                return name
    return None


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)
