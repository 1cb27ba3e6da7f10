"""Extract: the two captured graphs become one `Program`: steps in execution order, what each reads, and exact bytes.

A step is every node that computes something, views included; the naive gathers and reductions are not steps, they are what the
schedule will place. Bytes are counted by storage, as the fake tensors of the trace alias each other, so that a view costs
nothing and a tensor lives until the last use of its last alias. The graphs are executed with the boxed calling convention:
a saved tensor dies at its last use in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import fx

from zfx.ir import CostModel, Parameter, Phase, Program, Step

from .duration import duration_us, nominal_us
from .nodes import KEPT, aliased_inputs, is_gather, is_planned, is_reduction, storages


class Sharded(Protocol):
    """What is asked of a layout."""

    @property
    def name(self) -> str: ...

    def parameter(self, trainable: bool) -> Parameter: ...

    def shard_bytes(self, trainable: bool) -> int: ...


def extract(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    layouts: Sequence[Sharded],
    world_size: int,
    costs: CostModel,
    num_outputs: int | None = None,
    replicas: int = 1,
) -> Program:
    """The program of a forward graph and, in training, its backward.

    Args:
        layouts: by the index that the naive operators carry.
        num_outputs: how many of the forward's outputs go to the caller; the rest are saved for the backward. None: all.
        replicas: how many times the parameters are there on these ranks.
    """
    names = [layout.name for layout in layouts]
    parts = [_Part(forward, "forward", names, num_outputs=num_outputs)]
    if backward is not None:
        parts.append(_Part(backward, "backward", names))
    program_steps: list[Step] = []
    for part in parts:
        if part.phase == "backward":
            program_steps.append(_turn(parts[0], part))
        program_steps += part.steps(costs)
    trainable = {name for part in parts for name in part.gradients.values()}
    seen: dict[str, None] = {}
    for step in program_steps:
        seen.update(dict.fromkeys((*step.reads, *step.completes)))
    known = {layout.name: layout for layout in layouts}
    static = sum(layout.shard_bytes(layout.name in trainable) for layout in layouts)
    return Program(
        tuple(known[name].parameter(name in trainable) for name in seen),
        tuple(program_steps),
        world_size,
        tuple(name for name in seen if name in parts[0].escapes),
        static,
        costs,
        replicas=replicas,
    )


def _turn(forward: _Part, backward: _Part) -> Step:
    """The caller's code: all that the forward returned, saved tensors included, is live; escaping parameters are read."""
    done = tuple(name for node, name in backward.gradients.items() if not backward.is_step(node))
    return Step(
        "turn", "turn", "the caller's code", tuple(sorted(forward.escapes, key=forward.names.index)), done, forward.bytes_at_end()
    )


class _Part:
    """One graph, read once: who aliases which parameter, which storages live when."""

    def __init__(self, gm: fx.GraphModule, phase: Phase, names: Sequence[str], num_outputs: int | None = None) -> None:
        self.gm, self.phase, self.names = gm, phase, names
        self.nodes = [n for n in gm.graph.nodes if n.op == "call_function" and not is_planned(n)]
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.output = next(n for n in gm.graph.nodes if n.op == "output")
        self.aliases = find_aliases(gm, names)
        self.parameter_storages = {key for node in self.aliases for key, _ in storages(node)}
        self.gradients = {node.args[0]: names[node.args[2]] for node in gm.graph.nodes if is_reduction(node)}
        self.escapes = self._escapes(num_outputs) if phase == "forward" else set()
        self.lives = self._storage_lives()

    def is_step(self, node: fx.Node) -> bool:
        return node in self.position

    def _escapes(self, num_outputs: int | None) -> set[str]:
        """Parameters that leave as outputs. A whole gathered value that is saved is not one: the plan keeps it on purpose."""
        outputs = list(self.output.args[0])
        count = len(outputs) if num_outputs is None else num_outputs
        return {
            self.aliases[n]
            for i, n in enumerate(outputs)
            if isinstance(n, fx.Node) and n in self.aliases and (i < count or not is_gather(n))
        }

    def _storage_lives(self) -> dict[int, tuple[int, int, int]]:
        """storage -> (first step, last step, bytes); inputs begin at -1, what is returned ends after the last step."""
        lives: dict[int, tuple[int, int, int]] = {}
        at = -1
        end = len(self.nodes)
        skipped = {key for node in self.gradients for key, _ in storages(node)}
        for node in self.gm.graph.nodes:
            at = self.position.get(node, at)
            if is_planned(node) or node in self.aliases or node is self.output:
                continue
            last = max((end if user is self.output else self.position.get(user, at) for user in node.users), default=at)
            if node.op == "placeholder" and self.phase == "forward":
                last = end
            first = -1 if node.op == "placeholder" else at
            for key, num_bytes in storages(node):
                if key in self.parameter_storages or (node.op == "placeholder" and self._is_shard(node)):
                    continue
                old = lives.get(key)
                lives[key] = (min(first, old[0]), max(last, old[1]), num_bytes) if old else (first, last, num_bytes)
        return self._without_complete_gradients(lives, skipped)

    def _without_complete_gradients(
        self, lives: dict[int, tuple[int, int, int]], keys: set[int]
    ) -> dict[int, tuple[int, int, int]]:
        """A gradient counts as one from the step that completes it; before, it is a partial sum like any value."""
        complete: dict[int, int] = {}
        for node in self.gradients:
            for key, _ in storages(node):
                complete[key] = min(complete.get(key, len(self.nodes)), self.position.get(node, -1))
        return {
            key: (first, min(last, complete[key]) if key in keys else last, num_bytes)
            for key, (first, last, num_bytes) in lives.items()
        }

    def _is_shard(self, node: fx.Node) -> bool:
        return bool(node.users) and any(is_gather(user) for user in node.users)

    def bytes_at_end(self) -> int:
        return sum(n for _, last, n in self.lives.values() if last >= len(self.nodes))

    def steps(self, costs: CostModel) -> Iterator[Step]:
        change = [0] * (len(self.nodes) + 2)
        for first, last, num_bytes in self.lives.values():
            change[max(first, 0)] += num_bytes
            change[min(last, len(self.nodes)) + 1] -= num_bytes
        completes: dict[fx.Node, list[str]] = {}
        for node, name in self.gradients.items():
            completes.setdefault(node, []).append(name)
        nominal = nominal_us(self.gm, costs)
        live = 0
        for i, node in enumerate(self.nodes):
            live += change[i]
            reads = tuple(dict.fromkeys(self.aliases[a] for a in node.all_input_nodes if a in self.aliases))
            yield Step(
                f"{self.phase}.{node.name}",
                self.phase,
                str(node.target),
                reads,
                tuple(completes.get(node, ())),
                live,
                duration_us(node, costs),
                nominal.get(node, 0.0),
            )


def find_aliases(gm: fx.GraphModule, names: Sequence[str]) -> dict[fx.Node, str]:
    """Every node whose value may share memory with a gathered parameter, and which: by the fake tensors' storages and, where
    those tell nothing, by the operators' schemas. Sources are the naive gathers and the saved tensors that a plan keeps."""
    found: dict[fx.Node, str] = {}
    owner: dict[int, str] = {}
    for node in gm.graph.nodes:
        name = names[node.args[2]] if is_gather(node) else node.meta.get(KEPT) if node.op == "placeholder" else None
        if name is not None:
            owner.update((key, name) for key, _ in storages(node))
        elif node.op != "output":
            name = next((owner[key] for key, _ in storages(node) if key in owner), None)
            name = name or next((found[a] for a in aliased_inputs(node) if a in found), None)
        if name is not None:
            found[node] = name
    return found
