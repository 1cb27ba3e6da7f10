"""Lower: the only pass that writes FX. It puts the schedule's instructions between the steps of a captured graph.

    before                                           after
    gather = zfx.all_gather(shard, ...)              plan = zfx begin(self.plan)
    t = aten.t(gather)                               g = zfx all_gather(plan, 0, [shard])
    mm = aten.mm(x, t)                               (weight,) = zfx wait(plan, g)
    ...                                              t = aten.t(weight)
                                                     mm = aten.mm(x, t)
                                                     zfx release([weight])

The graph's inputs, outputs and compute stay as they were; only the naive operators disappear. Values are dropped by FX after
their last use, and inputs by the boxed calling convention, so a reference never outlives its last reader.
"""

from __future__ import annotations

import math
import operator
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from zfx.ir import Bucket, Instruction, Schedule

from .extract import find_aliases
from .nodes import KEPT, is_gather, is_planned, is_reduction, is_reshard


@dataclass(frozen=True, slots=True)
class Part:
    """One of the two graphs of a schedule, for what is done with its gradients."""

    schedule: Schedule
    phase: Literal["forward", "backward"]
    gradients: Literal["reduce", "hold", "join"] = "reduce"  # what becomes of a complete one, see unreduced.py

    def instructions(self) -> Iterator[Instruction]:
        """Those that this graph executes: up to the turn for the forward, after it for the backward."""
        turn = self.schedule.program.turn
        for instruction in self.schedule.instructions:
            if turn is None or (instruction.point <= turn) == (self.phase == "forward"):
                yield instruction


def lower(gm: fx.GraphModule, part: Part, names: Sequence[str], plan: Any, runtime: Any) -> fx.GraphModule:
    """A new GraphModule that runs as the schedule says.

    Args:
        names: of the parameters, by the index that the naive operators carry.
        plan: becomes the attribute `plan` of the module: what `runtime.begin` and the collectives are given.
        runtime: holds the functions that the new nodes call.
    """
    return _Lowering(gm, part, names, plan, runtime).run()


class _Lowering:
    def __init__(self, gm: fx.GraphModule, part: Part, names: Sequence[str], plan: Any, runtime: Any) -> None:
        self.gm, self.part, self.names, self.plan_value, self.runtime = gm, part, names, plan, runtime
        self.graph = fx.Graph()
        self.graph.set_codegen(_BoxedCodeGen())
        self.copies: dict[fx.Node, fx.Node] = {}
        self.sizes = {p.name: p.num_elements for p in part.schedule.program.parameters}
        self.buckets = part.schedule.buckets
        self.gather_nodes = {self.names[n.args[2]]: n for n in gm.graph.nodes if is_gather(n)}
        self.gradient_nodes = {self.names[n.args[2]]: n for n in gm.graph.nodes if is_reduction(n)}
        self.values: dict[str, fx.Node] = {}
        self.secondary: dict[str, fx.Node] = {}
        self.shard_grads: dict[str, fx.Node | None] = {}
        self.joined: dict[str, fx.Node] = {}  # gradients that have been joined by what was held
        self.pending: dict[int, fx.Node] = {}
        self.aliases = find_aliases(gm, names)
        self.made_from: dict[fx.Node, fx.Node | None] = {}  # alias -> the gathered value that its copy is a view of
        self.plan: fx.Node | None = None

    def run(self) -> fx.GraphModule:
        todo = deque(self.part.instructions())
        first = self._first_point()
        point = first
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self._copy(node)
                continue
            if self.plan is None and (todo or self._found() or self._waits()):
                self._begin()
                for placeholder in self.gm.graph.find_nodes(op="placeholder"):
                    self._complete(placeholder)
            if is_planned(node):
                continue
            if node.op == "output":
                self._emit(todo, math.inf)
                self._leave_carried()
                self.graph.output(fx.map_arg(node.args[0], self._resolve))
                continue
            if node.op == "call_function":
                self._emit(todo, point)
                point += 1
            self._copy(node)
            self._complete(node)
        return self._module()

    def _first_point(self) -> int:
        turn = self.part.schedule.program.turn
        return 0 if self.part.phase == "forward" or turn is None else turn + 1

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            copy = self._placeholder(node)
        else:
            copy = self.graph.node_copy(node, self._resolve)
            copy.target = self.runtime.plain_calls.get(copy.target, copy.target)
        if node not in self.copies:  # a view that is made again is no step
            copy.meta["zfx_step"] = f"{self.part.phase}.{node.name}"
        self.copies[node] = copy
        self.made_from[node] = self.values.get(self.aliases[node]) if node in self.aliases else None
        return copy

    def _placeholder(self, node: fx.Node) -> fx.Node:
        """An input, under its parameter's name if it is a shard (or a secondary one) or a parameter that was kept. Target and name
        must be one: where they differ FX makes two variables, and the second would keep a released value alive to the end."""
        kept = node.meta.get(KEPT)
        name = kept or next((self._shard_name(u) for u in node.users if is_gather(u)), node.name)
        copy = self.graph.placeholder(_identifier(name))
        copy.target = copy.name
        copy.meta.update(node.meta)
        if kept:
            self.values[kept] = copy
        return copy

    def _shard_name(self, gather: fx.Node) -> str:
        name = self.names[gather.args[2]]  # type: ignore[index]
        resharded = self.part.phase == "backward" and name in self.part.schedule.resharded and not self._is_replicated(name)
        return f"{name}.{'secondary' if resharded else 'shard'}"

    def _resolve(self, node: fx.Node) -> fx.Node | None:
        if is_reshard(node):
            return self.secondary[self.names[node.args[2]]]  # type: ignore[index]
        if is_gather(node):
            return self.values[self.names[node.args[2]]]  # type: ignore[index]
        if is_reduction(node):
            return self.shard_grads[self.names[node.args[2]]]  # type: ignore[index]
        if node in self.aliases and node.op == "call_function" and self.made_from[node] is not self.values[self.aliases[node]]:
            return self._copy(node)  # a view of a buffer that was released; the parameter has been gathered again since
        return self.copies[node]

    def _begin(self) -> None:
        attribute = self.graph.get_attr("plan")
        self.plan = self._call("begin", (attribute,), "begin")
        if self._found():
            self._arrive(self._call("take", (self.plan,), "carried"), self._found())

    def _found(self) -> tuple[str, ...]:
        """Parameters that the micro-batch before left behind for this graph."""
        schedule = self.part.schedule
        return schedule.carried if self.part.phase == "forward" and schedule.program.window in ("middle", "last") else ()

    def _arrive(self, values: fx.Node, names: Sequence[str]) -> None:
        """Name the items of a list of gathered values."""
        for i, name in enumerate(names):
            node = self.graph.create_node("call_function", operator.getitem, (values, i), name=_identifier(name))
            node.meta.update(self.gather_nodes[name].meta)
            self.values[name] = node

    def _leave_carried(self) -> None:
        schedule = self.part.schedule
        if self.part.phase == "backward" and schedule.program.window in ("first", "middle") and schedule.carried:
            self._call("carry", (self.plan, [self.values[name] for name in schedule.carried]), "carry")

    def _call(self, function: str, args: tuple[Any, ...], name: str) -> fx.Node:
        return self.graph.create_node("call_function", getattr(self.runtime, function), args, name=name)

    def _emit(self, todo: deque[Instruction], point: float) -> None:
        while todo and todo[0].point <= point:
            instruction = todo.popleft()
            getattr(self, f"_emit_{instruction.kind}")(instruction)

    def _bucket(self, instruction: Instruction) -> Bucket:
        assert instruction.bucket is not None
        return self.buckets[instruction.bucket]

    def _emit_all_gather(self, instruction: Instruction) -> None:
        bucket = self._bucket(instruction)
        shards = [self.copies[self.gather_nodes[name].args[0]] for name in bucket.parameters]
        self.pending[bucket.index] = self._call("all_gather", (self.plan, bucket.index, shards), f"gather_{bucket.index}")

    def _emit_wait(self, instruction: Instruction) -> None:
        bucket = self._bucket(instruction)
        self._arrive(self._call("wait", (self.plan, self.pending.pop(bucket.index)), f"arrived_{bucket.index}"), bucket.parameters)

    def _emit_reshard(self, instruction: Instruction) -> None:
        names = [name for name in instruction.parameters if not self._is_replicated(name)]  # for those, the shard will do
        if not names:
            return
        shards = self._call("reshard", (self.plan, [self.values[name] for name in names]), "reshard")
        for i, name in enumerate(names):
            what = _identifier(f"{name}.secondary")
            self.secondary[name] = self.graph.create_node("call_function", operator.getitem, (shards, i), name=what)

    def _emit_release(self, instruction: Instruction) -> None:
        freed: list[fx.Node] = []
        kept: list[fx.Node] = []
        for name in instruction.parameters:
            if self._is_replicated(name):
                continue
            (kept if self.part.phase == "backward" and name in self.part.schedule.kept else freed).append(self.values.pop(name))
        if freed:
            self._call("release", (freed,), "release")
        if kept:
            self._call("let_go", (kept,), "let_go")

    def _emit_reduce_scatter(self, instruction: Instruction) -> None:
        bucket = self._bucket(instruction)
        grads = [self.joined.get(name) or self._resolve(self.gradient_nodes[name].args[0]) for name in bucket.parameters]
        self.pending[bucket.index] = self._call("reduce_scatter", (self.plan, bucket.index, grads), f"reduce_{bucket.index}")

    def _waits(self) -> bool:
        return self.part.gradients != "reduce" and bool(self.gradient_nodes)

    def _complete(self, node: fx.Node) -> None:
        """Where gradients wait: hold those that this node completes, or join them with what is held."""
        if not self._waits():
            return
        for name in [name for name, gradient in self.gradient_nodes.items() if gradient.args[0] is node]:
            what = _identifier(f"{name}.{self.part.gradients}")
            waiting = self._call(self.part.gradients, (self.plan, name, self._resolve(node)), what)
            if self.part.gradients == "hold":
                self.shard_grads[name] = None  # .grad stays as it is
            else:
                self.joined[name] = waiting

    def _emit_wait_reduce(self, instruction: Instruction) -> None:
        bucket = self._bucket(instruction)
        reduced = self._call("wait_reduce", (self.plan, self.pending.pop(bucket.index)), f"reduced_{bucket.index}")
        if self.part.schedule.program.replicas > 1:
            self.pending[bucket.index] = reduced
        else:
            self._name_gradients(bucket, reduced)

    def _emit_all_reduce(self, instruction: Instruction) -> None:
        bucket = self._bucket(instruction)
        parts = self.pending[bucket.index]
        self.pending[bucket.index] = self._call("all_reduce", (self.plan, bucket.index, parts), f"across_{bucket.index}")

    def _emit_wait_all_reduce(self, instruction: Instruction) -> None:
        bucket = self._bucket(instruction)
        across = self.pending.pop(bucket.index)
        self._name_gradients(bucket, self._call("wait_all_reduce", (self.plan, across), f"averaged_{bucket.index}"))

    def _name_gradients(self, bucket: Bucket, reduced: fx.Node) -> None:
        for i, name in enumerate(bucket.parameters):
            node = self.graph.create_node("call_function", operator.getitem, (reduced, i), name=_identifier(f"{name}.grad"))
            node.meta.update(self.gradient_nodes[name].meta)
            self.shard_grads[name] = node

    def _is_replicated(self, name: str) -> bool:
        """A 0-dim parameter (or an empty one): its value is the local tensor itself and is never given back."""
        return self.sizes[name] == 0

    def _module(self) -> fx.GraphModule:
        self.graph.lint()
        root = torch.nn.Module()
        root.plan = self.plan_value
        for name, module in self.gm.named_children():
            setattr(root, name, module)
        for node in self.gm.graph.nodes:
            if node.op == "get_attr" and not hasattr(root, node.target.split(".")[0]):
                setattr(root, node.target.split(".")[0], getattr(self.gm, node.target.split(".")[0]))
        out = fx.GraphModule(root, self.graph, class_name=f"{self.part.phase}_{len(self.part.schedule.program.steps)}_steps")
        out.meta["zfx"] = self.part
        return out


def _identifier(name: str) -> str:
    """A parameter's name as the name of a node."""
    return re.sub(r"\W", "_", name)
