"""Durations: what kind of work each node of a captured graph is, how much of it, and how long that takes by the cost model.

    node                            kind                       flops        bytes
    aten.addmm(b, x, w)             matmul.float32             2 m n k      b + x + w + result
    aten.gelu(x)                    transcendental.float32     0            x + result
    aten.embedding(table, ids)      indexing.float32           0            ids + 2 result: the table is not read whole
    aten.t(w)                       a view: no work

A kind is a name with dots, from the general to the special, e.g. `matmul.bfloat16`; `CostModel.compute_us` uses the rate of the
longest beginning that it lists. The full kind of a node ends with its operator and the shapes that it works on, so that a table
can hold even the measured time of one operator on one shape.

Flops are those of `torch.utils.flop_counter`; where it knows none, bytes decide. Sizes that are symbols count by their value at
capture. [Note: nominal durations] ranks with other data have other durations but must plan the same collectives, so each step has a
second duration that the parameters alone decide: see `nominal_us`. Everything here is linear in the size of the graph.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry, sdpa_flop

from zfx.ir import CostModel

from .nodes import KEPT, aliased_inputs, is_gather, is_reduction, number, tensors

PRODUCTS = ("matmul", "attention", "convolution")
KINDS = (*PRODUCTS, "elementwise", "transcendental", "reduction", "copy", "indexing", "random")

# operators by the beginning of their names, in whole words: `gelu` stands for `gelu_backward` too
_BEGINNINGS = {
    "matmul": "mm addmm bmm baddbmm addbmm _scaled_mm _int_mm _grouped_mm mv addmv dot linear leaf",
    "attention": "_scaled_dot_product _flash_attention _efficient_attention flex_attention",
    "convolution": "convolution _convolution cudnn_convolution mkldnn_convolution _slow_conv2d",
    "elementwise": "tanh_backward sigmoid_backward",
    "transcendental": "exp expm1 exp2 log log1p log2 log10 sin cos tan tanh sinh cosh asin acos atan erf erfc erfinv sigmoid "
    "log_sigmoid gelu silu mish elu softplus pow _softmax _log_softmax logsumexp",
    "reduction": "sum mean var std prod norm max min cumsum cumprod logcumsumexp sort topk avg adaptive _adaptive nll_loss "
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm _fused_rms_norm "
    "_softmax_backward _log_softmax_backward",
    "copy": "clone copy _to_copy cat stack constant_pad_nd repeat flip roll full zeros ones new_full new_zeros new_ones arange "
    "scalar_tensor empty new_empty slice_backward select_backward slice_scatter select_scatter",
    "indexing": "embedding index gather scatter take masked_select _unsafe_index",
}
_KIND_OF_BEGINNING = {beginning: kind for kind, row in _BEGINNINGS.items() for beginning in row.split()}


def kind_of(target: Any) -> str:
    """One of `KINDS`: what limits this operator, as far as its name and torch's tags tell."""
    name, tags = getattr(target, "overloadpacket", target).__name__, getattr(target, "tags", ())
    words = name.split("_")
    for length in range(len(words), 0, -1):
        kind = _KIND_OF_BEGINNING.get("_".join(words[:length]))
        if kind is not None:
            return kind
    if torch.Tag.nondeterministic_seeded in tags:
        return "random"
    return "reduction" if torch.Tag.reduction in tags else "elementwise"


@dataclass(frozen=True, slots=True)
class Work:
    """What one node asks of the device. `kind` is the full one, down to operator and shapes."""

    kind: str
    num_flops: int
    num_bytes: int


def work_of(node: fx.Node) -> Work | None:
    """The work of a node, or None for views and bookkeeping."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return None
    return _work(node.target, node.args, node)


def _work(target: torch._ops.OpOverload, args: tuple[Any, ...], node: fx.Node) -> Work:
    kind = kind_of(target)
    return Work(f"{kind}.{_dtype(node)}.{_signature(node)}", _flops(target, args, node), _bytes(kind, node))


def duration_us(node: fx.Node, costs: CostModel) -> float:
    """The estimated time of one node. A higher-order operator takes that of the operator that it wraps (activation checkpointing
    does, to replay random numbers), or of its longest branch (`torch.cond`); a view none, unless the costs list a rate for "view"
    (a measured one: what it takes to ask for it)."""
    work = work_of(node)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        place = next((i for i, a in enumerate(node.args) if isinstance(a, torch._ops.OpOverload)), None)
        if place is None:
            return max((sum(duration_us(n, costs) for n in branch.graph.nodes) for branch in _branches(node)), default=0.0)
        work = _work(node.args[place], node.args[place + 1 :], node)  # type: ignore[arg-type]
    if work is not None:
        return costs.compute_us(work.kind, work.num_flops, work.num_bytes)
    view = costs.rate_of("view")
    return view.overhead_us if view.kind == "view" and isinstance(node.target, torch._ops.OpOverload) else 0.0


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its inputs in another way. An operator that writes into its input is no view."""
    target = node.target
    writes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return not writes and any(True for _ in aliased_inputs(node))


def _branches(node: fx.Node) -> Iterable[fx.GraphModule]:
    owner = node.graph.owning_module
    names = [a.target for a in node.all_input_nodes if a.op == "get_attr"]
    return [m for m in (getattr(owner, str(name), None) for name in names) if isinstance(m, fx.GraphModule)]


# ---- how much ----------------------------------------------------------------------------------------------------------


def _flops(target: torch._ops.OpOverload, given: tuple[Any, ...], node: fx.Node) -> int:
    count = _OWN_FORMULAS.get(str(target.overloadpacket)) or flop_registry.get(target.overloadpacket)
    if count is None:
        return 0
    args, kwargs, out = map_aggregate((given, node.kwargs, node.meta.get("val")), _concrete)
    try:
        return number(count(*args, **kwargs, out_val=out))
    except (AssertionError, TypeError, ValueError, RuntimeError):  # a shape that the formula doesn't know: bytes decide
        return 0


def _concrete(value: Any) -> Any:
    """What a formula is given: tensors of numbers where the trace has symbols, so that counting sets up no guards."""
    if isinstance(value, fx.Node):
        return map_aggregate(value.meta.get("val"), _concrete)
    if isinstance(value, torch.Tensor):
        return torch.empty([number(n) for n in value.shape], dtype=value.dtype, device="meta")
    return number(value) if isinstance(value, torch.SymInt) else value


def _sdpa_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """The scores again, and one product for each operand of the forward's two: five where the forward has two."""
    return 5 * sdpa_flop(query, key, value) // 2


def _grouped_mm(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Each row of `left` meets one of the matrices of `right`."""
    return 2 * left.numel() * right.shape[-1]


def _leaf(params: Any, buffers: Any, inputs: Any, *args: Any, **kwargs: Any) -> int:
    """As if every parameter were a matrix that each row of the largest input meets once."""
    rows = max(
        (t.numel() // t.shape[-1] if t.is_floating_point() and t.dim() else t.numel() for t in inputs if t.numel()), default=1
    )
    return 2 * rows * sum(p.numel() for p in params)


def _leaf_backward(grads: Any, params: Any, buffers: Any, inputs: Any, *args: Any, **kwargs: Any) -> int:
    """The forward again, and twice as much for the gradients."""
    return 3 * _leaf(params, buffers, inputs)


# for what torch doesn't count: SDPA on CPUs, grouped products, and our own leaves
_OWN_FORMULAS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": sdpa_flop,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward,
    "aten._scaled_dot_product_fused_attention_overrideable": sdpa_flop,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": _sdpa_backward,
    "aten._grouped_mm": _grouped_mm,
    "zfx.leaf": _leaf,
    "zfx.leaf_backward": _leaf_backward,
}


def _bytes(kind: str, node: fx.Node) -> int:
    """What is read and written. Indexing reads of its first argument, the table, no more than it returns."""
    written = sum(map(_size, tensors(node.meta.get("val"))))
    read = [sum(map(_size, tensors(a.meta.get("val")))) for a in node.all_input_nodes]
    if kind == "indexing" and read:
        read[0] = min(read[0], written)
    return sum(read) + written


def _size(tensor: torch.Tensor) -> int:
    """Bytes that a reader of the tensor touches: an expanded one is smaller in memory than it looks."""
    if tensor.layout is not torch.strided:
        return 0
    seen = prod(number(n) for n, stride in zip(tensor.shape, tensor.stride()) if number(stride) != 0)
    return seen * tensor.element_size()


def _dtype(node: fx.Node) -> str:
    """The precision that the work is done in: that of the first floating-point input, else of the result."""
    values = [t for a in (*node.all_input_nodes, node) for t in tensors(a.meta.get("val"))]
    found = next((t.dtype for t in values if t.is_floating_point() or t.is_complex()), values[0].dtype if values else None)
    return str(found).removeprefix("torch.")


def _signature(node: fx.Node) -> str:
    """The operator and what it is called with: tensors by shape (`/` where one is not contiguous), all else by value."""

    def shape(tensor: torch.Tensor) -> str:
        dense = tensor.layout is torch.strided and not tensor.is_contiguous()
        return "x".join(str(number(n)) for n in tensor.shape) + ("/" if dense else "")

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            return shape(value)
        if isinstance(value, (tuple, list)):
            return f"[{','.join(map(text, value))}]"
        return str(number(value)) if isinstance(value, torch.SymInt) else str(value)

    values = [*map(text, node.args), *(f"{key}={text(value)}" for key, value in node.kwargs.items())]
    return f"{node.target}({','.join(values)})"


# ---- by the parameters alone -------------------------------------------------------------------------------------------


def nominal_us(gm: fx.GraphModule, costs: CostModel) -> dict[fx.Node, float]:
    """The time of each node that has to do with parameters, by the parameters alone: [Note: nominal durations].

    A product that reads a parameter, or makes a gradient of one, costs 2 flops an element for each of `costs.nominal_tokens` rows.
    Products with parts of a parameter (experts, a fused projection that was split) share its elements. All
    else (embeddings, norms, biases, casts) costs the parameters' own bytes. Values that are computed from
    parameters alone count as the parameters that they come from; a node that has to do with none is not in the result.
    """
    sources = _sources(gm)
    makers = _makers(gm, sources)
    touched: dict[fx.Node, list[tuple[fx.Node, bool]]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_gather(node) and not is_reduction(node) and not is_view(node):
            for value in node.all_input_nodes:
                touched[node] += [(source, _numel(value) < _numel(source)) for source in sources.get(value, ())]
            touched[node] += [(grad, _numel(node) < _numel(grad)) for grad in makers.get(node, ())]
    shares = Counter(value for node, values in touched.items() for value, part in values if part and _is_product(node))
    out = {}
    for node, values in touched.items():
        product = _is_product(node)
        numel = sum(_numel(v) / (shares[v] if part and product else 1) for v, part in values)
        num_bytes = sum(_numel(v) * v.meta["val"].element_size() for v, _ in values)
        if values and isinstance(node.target, torch._ops.OpOverload):
            kind = f"{kind_of(node.target)}.{_dtype(node)}"
            out[node] = costs.compute_us(kind, int(2 * costs.nominal_tokens * numel) if product else 0, num_bytes)
    return out


def _sources(gm: fx.GraphModule) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
    """Every value that is computed from parameters alone, with the parameters that it comes from."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in gm.graph.nodes:
        if is_gather(node) or (node.op == "placeholder" and KEPT in node.meta):
            found[node] = (node,)
        elif node.op == "call_function" and not is_reduction(node):
            inputs = [a for a in node.all_input_nodes if any(True for _ in tensors(a.meta.get("val")))]
            if inputs and all(a in found for a in inputs):
                found[node] = tuple(dict.fromkeys(source for a in inputs for source in found[a]))
    return found


def _makers(gm: fx.GraphModule, sources: Mapping[fx.Node, Any]) -> Mapping[fx.Node, list[fx.Node]]:
    """The nodes that make each gradient: what is found walking back from its reduction through views, casts and sums."""
    makers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for reduction in gm.graph.nodes:
        if not is_reduction(reduction):
            continue
        grad, seen = reduction.args[0], set[fx.Node]()
        todo = [grad]
        while todo:
            node = todo.pop()
            if node in seen or node in sources or node.op != "call_function":
                continue
            seen.add(node)
            if _passes_on(node):
                todo += node.all_input_nodes
            else:
                makers[node].append(grad)
    return makers


def _passes_on(node: fx.Node) -> bool:
    """Whether a gradient is only handed on: viewed, copied, or added up with others of its size."""
    if is_view(node):
        return True
    kind = kind_of(node.target)
    same = all(_numel(a) == _numel(node) for a in node.all_input_nodes)
    return kind == "copy" or (kind == "elementwise" and same)


def _is_product(node: fx.Node) -> bool:
    return kind_of(node.target) in PRODUCTS


def _numel(node: fx.Node) -> int:
    return sum(number(t.numel()) for t in tensors(node.meta.get("val")))
