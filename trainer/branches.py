# SPDX-License-Identifier: Apache-2.0
"""B1: a model's parallel branches, found in its traced forward pass, or named by `branches(model)` of job.py.

A *fork* is a node with two or more users whose ways meet again in one node. All inputs of a model together are such a
node, too: towers begin there. What is on one way is a *branch*. Ways that share a node are one way.

    a way without parameters        is no branch, and a fork with a single branch is none: a residual connection
    forks in a branch (nested)      stay in it, unless it is so large that no two sets could be near-equal: then it is
                                    taken apart into the branches and modules that are in it
    a module on two ways, or on one and elsewhere (shared, or called twice)
                                    belongs to no branch. The same holds for a parameter that modules share
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor, fx, nn

from trainer.errors import JobError, Untraceable
from trainer.job import Job, describe

#: Sets that differ by this part of all parameters, or more, are not near-equal.
UNEQUAL = 0.05

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Needs = dict[fx.Node, tuple[str, ...]]
"""The names of the parameters and buffers that a node of a traced model reads; a name of several is the first one."""


@dataclass(frozen=True, slots=True)
class Item:
    """What is in a set as a whole: a branch, or what is in none.

    Attributes: `modules`, their names (of a parameter that the model itself holds: its own); `parameters` and
    `buffers`, names in the model's order; `numbers`, how many of each parameter are trained.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    numbers: tuple[int, ...]
    is_branch: bool

    @property
    def size(self) -> int:
        """How many numbers are trained."""
        return sum(self.numbers)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Parameters and buffers."""
        return self.parameters + self.buffers


def items_of(job: Job) -> list[Item]:
    """The branches of the job's model, and all other modules with parameters, in the model's order.

    Raises:
        JobError: the model cannot be traced, and job.py names no branches, or names them wrongly.
    """
    model = job.model()
    lists = job.branches(model)
    if lists is not None:
        return named(model, lists)
    try:
        graph = trace(model)
    except Untraceable as error:
        place = describe(error.__cause__ or error, job.folder, "model()")
        raise Untraceable(
            f"the model's branches cannot be found: torch.fx cannot trace it: {place}: define branches(model) in "
            "job.py, which returns lists of module names, one for each branch (docs/jobs.md)"
        ) from error
    return find(model, graph)


def trace(model: nn.Module) -> fx.Graph:
    """The forward pass of the model as it trains, as a graph.

    Tracing runs the model's own code. What that changes at once, such as a buffer, stays changed.

    Raises:
        Untraceable: with the error behind it.
    """
    model.train()
    try:
        return fx.Tracer().trace(model)
    except Exception as error:
        raise Untraceable(f"torch.fx cannot trace the model: {error}") from error


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are one node each where a model is traced: PyTorch's own, the outermost of them."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in found)
        if name and not inner and not isinstance(module, _CONTAINERS):
            if fx.Tracer().is_leaf_module(module, name):
                found[name] = module
    return found


def needs_of(model: nn.Module, graph: fx.Graph) -> Needs:
    """What each node of the traced model reads."""
    names = {id(tensor): name for name, tensor in _tensors(model).items()}
    found: Needs = {}
    for node in graph.nodes:
        held: Iterable[Tensor] = ()
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            held = (*module.parameters(), *module.buffers())
        elif node.op == "get_attr":
            held = (reduce(lambda part, key: getattr(part, key, None), _path(node), model),)  # type: ignore[arg-type]
        found[node] = tuple(names[id(tensor)] for tensor in held if id(tensor) in names)
    return found


def find(model: nn.Module, graph: fx.Graph) -> list[Item]:
    """The branches in `graph`, as `trace` has made it of the model, and all other modules with parameters."""
    return _Finder(model, graph).items()


def named(model: nn.Module, lists: Sequence[Sequence[str]]) -> list[Item]:
    """The branches that are these modules, and all other modules with parameters.

    Raises:
        JobError: there is no such module, a branch has no parameters, or two have the same one.
    """
    tensors = _tensors(model)
    names = {id(tensor): name for name, tensor in tensors.items()}
    owner: dict[str, int] = {}
    for number, modules in enumerate(lists):
        for name in modules:
            try:
                module = model.get_submodule(name)
            except AttributeError:
                raise JobError(
                    f"job.py: branches(): the model has no module {name!r} (of named_modules())"
                ) from None
            for tensor in (*module.parameters(), *module.buffers()):
                held = names[id(tensor)]
                if owner.setdefault(held, number) != number:
                    raise JobError(
                        f"job.py: branches(): {held!r} is in two branches: in that of "
                        f"{lists[owner[held]][0]!r}, and in that of {lists[number][0]!r}"
                    )
        if not any(tensors[held].requires_grad for held, of in owner.items() if of == number):
            raise JobError(
                f"job.py: branches(): branch {number + 1} ({', '.join(modules) or 'empty'}) has no parameters to train"
            )
    found = [
        _item(tensors, [held for held, of in owner.items() if of == number], tuple(modules), True)
        for number, modules in enumerate(lists)
    ]
    units: dict[str, str] = {}
    for unit, module in leaves(model).items():
        for tensor in (*module.parameters(), *module.buffers()):
            units.setdefault(names[id(tensor)], unit)
    return _with_rest(tensors, found, units)


class _Finder:
    """Finds branches in a traced model. Nodes are numbers here, in the order of the graph; 0 is before all inputs."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._tensors = _tensors(model)
        self._nodes: list[fx.Node] = list(graph.nodes)
        number = {node: at for at, node in enumerate(self._nodes, 1)}
        last = len(self._nodes)  # the output
        self._next = [[number[n] for n in self._nodes if n.op == "placeholder"]]
        self._next += [sorted(number[user] for user in node.users) for node in self._nodes]
        self._next[1:last] = [users or [last] for users in self._next[1:last]]
        # Of each node the first one that all ways from it to the output pass: its immediate post-dominator.
        self._meets = [last] * (last + 1)
        for at in reversed(range(last)):
            if self._next[at]:
                self._meets[at] = reduce(self._common, self._next[at])
        needs = needs_of(model, graph)
        self._users: dict[str, set[int]] = {}
        self._unit: dict[str, str] = {}  # of a tensor that a node reads: the module that is called
        for node, names in needs.items():
            for name in names:
                self._users.setdefault(name, set()).add(number[node])
                if node.op == "call_module":
                    self._unit.setdefault(name, str(node.target))
        self._total = sum(_size(tensor) for tensor in self._tensors.values())

    def items(self) -> list[Item]:
        found = [
            _item(self._tensors, names, tuple(dict.fromkeys(map(self._module, names))), True)
            for names in self._branches(set(range(len(self._next))))
        ]
        return _with_rest(self._tensors, found, self._unit)

    def _module(self, name: str) -> str:
        return _unit(name, self._unit)

    def _branches(self, inside: set[int], entries: Sequence[int] = ()) -> Iterator[list[str]]:
        """The tensors of each branch among these nodes, into which `entries` lead; from outer forks to inner ones."""
        taken: set[int] = set()
        yield from self._fork(entries, inside, taken)
        for start in sorted(inside):
            if start not in taken:
                yield from self._fork(self._next[start], inside, taken)

    def _fork(
        self, entries: Sequence[int], inside: set[int], taken: set[int]
    ) -> Iterator[list[str]]:
        """The branches that begin at `entries`; their nodes are taken then."""
        if len(entries) < 2:
            return
        ways = self._ways(entries)
        led = [(way, [at for at in entries if at in way]) for way in ways]
        owned = [(way, into, names) for way, into in led if (names := self._own(way))]
        if len(owned) < 2:
            # Such as four ways and a residual connection: until they meet it, the four are one way.
            for _, into in led:
                if len(into) < len(entries):
                    yield from self._fork(into, inside, taken)
        elif all(way <= inside and not way & taken for way in ways):
            taken.update(*ways)
            for way, into, names in owned:
                if self._is_too_large(names):
                    yield from self._branches(way, into)
                else:
                    yield names

    def _is_too_large(self, names: list[str]) -> bool:
        """Whether this and all the rest would be two sets that are not near-equal."""
        size = sum(_size(self._tensors[name]) for name in names)
        return 2 * size - self._total >= UNEQUAL * self._total

    def _own(self, way: set[int]) -> list[str]:
        """The tensors that these nodes read and no others; none if none of them is trained."""
        names = [name for name, users in self._users.items() if users <= way]
        return names if any(_size(self._tensors[name]) for name in names) else []

    def _ways(self, entries: Sequence[int]) -> list[set[int]]:
        """The nodes from `entries` to the one in which their ways meet; those that are connected are one way."""
        end = reduce(self._common, entries)
        way_of: dict[int, int] = {}
        waiting = [at for at in entries if at != end]
        while waiting:
            at = waiting.pop()
            if at not in way_of:
                way_of[at] = at
                waiting += [user for user in self._next[at] if user != end]
        for at in sorted(way_of):
            for user in self._next[at]:
                if user != end and way_of[user] != way_of[at]:
                    other = way_of[user]
                    for node in [node for node, way in way_of.items() if way == other]:
                        way_of[node] = way_of[at]
        ways: dict[int, set[int]] = {}
        for at in sorted(way_of):
            ways.setdefault(way_of[at], set()).add(at)
        return list(ways.values())

    def _common(self, a: int, b: int) -> int:
        """The first node that all ways from both pass."""
        while a != b:
            a, b = (self._meets[a], b) if a < b else (a, self._meets[b])
        return a


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _size(tensor: Tensor) -> int:
    return tensor.numel() if tensor.requires_grad else 0


def _path(node: fx.Node) -> list[str]:
    return str(node.target).split(".")


def _unit(name: str, units: Mapping[str, str]) -> str:
    """The module that a tensor belongs to: the one that is called, or that holds it; or the tensor itself."""
    return units.get(name) or name.rpartition(".")[0] or name


def _item(
    tensors: Mapping[str, Tensor], names: Iterable[str], modules: tuple[str, ...], branch: bool
) -> Item:
    chosen = set(names)
    ordered = {name: tensor for name, tensor in tensors.items() if name in chosen}
    parameters = tuple(n for n, tensor in ordered.items() if isinstance(tensor, nn.Parameter))
    buffers = tuple(name for name in ordered if name not in parameters)
    numbers = tuple(_size(ordered[name]) for name in parameters)
    return Item(modules, parameters, buffers, numbers, branch)


def _with_rest(
    tensors: Mapping[str, Tensor], found: list[Item], units: Mapping[str, str]
) -> list[Item]:
    """These, and an item for each module that has something else; in the model's order."""
    in_branches = {name for item in found for name in item.tensors}
    rest: dict[str, list[str]] = {}
    for name in tensors:
        if name not in in_branches:
            rest.setdefault(_unit(name, units), []).append(name)
    singles = [_item(tensors, names, (unit,), False) for unit, names in rest.items()]
    place: dict[str, Any] = {name: at for at, name in enumerate(tensors)}
    return sorted([*found, *singles], key=lambda item: place[item.tensors[0]])
