"""`zfx.compile`: the front door."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .agreement import digest_of
from .aliases import check_aliases, remember_replaced
from .blueprint import Blueprint
from .born import initial_shards, is_on_meta
from .bucket import gather_whole
from .channels import Channels, channels_for
from .costs import CostModel, load_costs
from .dtensors import learn_operators
from .engine import MARK, Engine, Slot
from .errors import RankMismatch
from .fingerprint import fingerprint
from .free_memory import with_free_memory
from .leaf import make_leaves
from .limits import Limits
from .passes import PIPELINE, Pass
from .precision import Precision
from .settings import Settings
from .shard import Layout, layout_of, shard_parameters, shard_rank, unique_parameters
from .subclass import subclass
from .together import together

M = TypeVar("M", bound=nn.Module)


def compile(
    model: M,
    world_size: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    limits: Limits | None = None,
    costs: CostModel | str | os.PathLike[str] | None = None,
    passes: Sequence[Pass] = PIPELINE,
    uniform: bool = False,
    leaf_modules: Sequence[type[nn.Module] | nn.Module] = (),
    timeout: float = 60.0,
    accumulate: int = 1,
    precision: Precision | None = None,
    replicas: int | None = None,
    reshard_after_forward: int | None = None,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> M:
    """Shard a model's parameters in place and run its forward and backward by a compiled ZeRO-3 schedule.

    The same object comes back: its class becomes a subclass of its own, every parameter a `DTensor` sharded over rows under its
    own name (0-dim parameters are replicated). Nothing is wrapped and no hook is set. The first call with new inputs captures
    and plans; gradients arrive as DTensors, averaged over ranks as in DDP.

    Args:
        model: any `nn.Module`. Its parameters must be whole and the same on every rank, or on the meta device: those get their
            first values here, one at a time, so that no rank holds more than its shards and the largest of them (see `init_fn`).
        world_size: number of ranks; must be the process group's. Default: the process group's, or torchrun's WORLD_SIZE, or 1.
            Where there is no process group and no torchrun, the model can be planned for any `world_size`, but only run for 1.
        mesh: a DeviceMesh: of one dimension, to shard over; or of two, replicate x shard, as FSDP2's `fully_shard` takes it (HSDP).
            Default: all ranks.
        replicas: how many replicas the ranks form; each is `world_size / replicas` consecutive ranks, over which parameters are
            sharded. Gradients are averaged over all ranks. Default: the mesh's, else 1. Beside `world_size`, and not only in a
            mesh, because a mesh needs a process group, and a model can be planned without one.
        reshard_after_forward: a number of neighbouring ranks, most often those of a node, that divides the ranks of a replica: what
            FSDP2 knows by this name, and DeepSpeed as `zero_hpz_partition_size`. Of what the backward needs again and the limits
            let nobody keep whole, each rank then keeps a secondary shard, one of so many, and the backward gathers from those few
            ranks. It is the planner's choice, parameter by parameter: secondary shards count against `memory_budget`, and come
            into being only where `costs` say that their gathers are no slower. No number is changed by it. Default, and for the
            number of all ranks of a replica: the backward gathers from all of them. (FSDP2's True is the default here, and its
            False a question of limits: `Limits(max_reuse_distance=...)`.)
        limits: bounds of the schedule. Default: DeepSpeed's defaults, see `Limits`.
        costs: what compute and communication cost: a `CostModel`, or the path of one that `zfx calibrate` wrote.
        passes: the planning passes to run, in order, instead of `zfx.passes.PIPELINE`: most often `[*zfx.passes.PIPELINE, mine]`,
            and the same on every rank. What each of them returns is verified. See docs/passes.md.
        uniform: every rank runs the same shapes at each call, so that the time and memory of the captured steps may decide which
            collectives there are, and not the parameters alone. Ranks that then run different shapes end in `RankMismatch`.
        leaf_modules: classes or instances whose forward can't be traced (RNNs, data-dependent experts): they run eagerly as one
            opaque node, and again in the backward; their parameters are gathered before and released after.
        accumulate: micro-batches (backwards) between two optimizer steps. Parameters do not change in between, so what the limits
            allow to keep lives on from one to the next: a chain of n layers with room for k takes n + (2 * accumulate - 1)(n - k)
            gathers. Fewer backwards before a step are no error, they only gather more than planned. Default 1.
            Changes through `p.data` are seen only once gradients are cleared (`zero_grad`) or a `torch.optim` optimizer steps.
        precision: dtypes to gather, compute and reduce in, see `Precision`. Default: every parameter's own.
        init_fn: for a model on the meta device: called once as `init_fn(model)`, it writes every parameter and buffer in place, by
            any operations, alike on every rank. Default: as the model's constructor would have, by the `reset_parameters` of its
            modules and transformers' `init_weights`; docs/state.md says when that is bit for bit what a plain model gets from the
            same seed. `zfx.skip_init`: `zfx.load_pretrained` comes next. Not called where there is no process group.
        timeout: seconds that ranks wait for one that does not come, before all raise `RankMismatch`.

    Raises:
        RankMismatch: ranks do not start from the same parameters (a sample of their values is compared) or, on the meta device,
            from the same random state; `init_fn` raised on one of them.
        ValueError: `world_size` or `replicas` differs from the process group's or the mesh's, the ranks can't be divided among the
            replicas, or those of a replica into groups of `reshard_after_forward`, the mesh has more than two dimensions, the model
            is compiled already, a parameter has hooks or is held by an optimizer; nothing gives a parameter or buffer on the meta
            device a value; `init_fn` is given and nothing is on the meta device.
        TypeError: an argument of the wrong type.

    Example:
        >>> import torch, zfx
        >>> model = zfx.compile(torch.nn.Linear(4, 2), world_size=64)
        >>> len(model.zfx.plan(torch.randn(3, 4)).buckets)
        2
    """
    _check_arguments(model, world_size, mesh, limits, costs, leaf_modules, timeout, accumulate, precision, replicas)
    _check_planning(passes, uniform)
    _check_init(model, init_fn)
    if isinstance(costs, (str, os.PathLike)):
        costs = load_costs(costs)
    _check_resharding(reshard_after_forward)
    mesh, world_size, replicas = find_ranks(world_size, mesh, replicas)
    reshard_to = smaller_group(reshard_after_forward, world_size // replicas)
    _check_model(model)
    limits = limits or Limits()
    if mesh is None and limits.follows_free_memory:
        raise ValueError("memory_budget='auto' follows the free memory of running ranks: without a process group, give bytes")
    entries = unique_parameters(model)
    precision = precision or Precision()
    layouts = [
        layout_of(owners[0].name, param, world_size, precision.for_module(owners[0].module), replicas) for param, owners in entries
    ]
    trained = [param.requires_grad for param, _ in entries]
    slots = [Slot.of(owners) for _, owners in entries]
    channels = None if mesh is None else channels_for(mesh, timeout)
    if channels is not None:
        smaller = f" and reshard_after_forward={reshard_to}" if reshard_to else ""
        lines = [f"zfx.compile of {type(model).__name__} with memory_budget={limits.memory_budget}{smaller}"]
        lines += [_described(owners[0].name, param) for param, owners in entries]
        if init_fn is None and is_on_meta(model):
            state = torch.empty(4, dtype=torch.int64).random_(generator=torch.default_generator.clone_state())
            lines.append(f"random state {fingerprint(state)} for initial values (seed all ranks alike before zfx.compile)")
        channels.agreement.begin(digest_of(lines), lines)
        if reshard_to:
            channels.reshard_to(reshard_to, timeout)
    del entries  # the whole parameters, which are given up one after another now
    make_leaves(model, leaf_modules)
    if mesh is not None:
        device = _device(mesh)
        assert channels is not None
        learn_operators()
        remember_replaced(model)
        shards = _initialise(model, layouts, init_fn, mesh, device, channels) if is_on_meta(model) else {}
        shard_parameters(model, layouts, mesh, device, shards)
        _place_buffers(model, device)
        if limits.follows_free_memory:
            num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            limits = with_free_memory(limits, list(zip(layouts, trained)), device, num_local_ranks, channels.agreement)
    if precision.buffer_dtype is not None:
        _cast_buffers(model, precision.buffer_dtype)
    base = type(model)
    settings = Settings(limits, costs or CostModel(), tuple(passes), uniform, accumulate, precision, reshard_to)
    blueprint = Blueprint(base.__name__, layouts, world_size, settings, channels, replicas)
    for _, owners in unique_parameters(model):
        for owner in owners:
            owner.module.__dict__[MARK] = blueprint.id
    engine = Engine(
        blueprint,
        slots,
        base.forward,
        has_rnn=any(isinstance(m, nn.RNNBase) for m in model.modules()),
    )
    if channels is not None:
        engine.watch()
    model.__dict__["_zfx_engine"] = engine
    model.__class__ = subclass(base, slots[0].places[0] if slots else None)  # type: ignore[assignment]
    return model


def _initialise(
    model: nn.Module,
    layouts: list[Layout],
    init_fn: Callable[[nn.Module], Any] | None,
    mesh: DeviceMesh,
    device: torch.device,
    channels: Channels,
) -> dict[int, torch.Tensor]:
    """First values for what is on the meta device; ranks see that they gave the same ones. A collective call."""

    def gather(index: int, shard: torch.Tensor) -> torch.Tensor:
        line = f"gather {layouts[index].name} in its initialisation"
        channels.agreement.begin(digest_of([line]), [line])
        return gather_whole(layouts[index], shard, channels.gathers)

    shards: dict[int, torch.Tensor] = {}
    lines: list[str] = []
    with together(channels.agreement, f"the initialisation of {type(model).__name__}", RankMismatch):
        shards, lines = initial_shards(model, layouts, init_fn, shard_rank(mesh), device, gather)
    channels.agreement.begin(digest_of(lines), [f"the initialisation of {type(model).__name__}", *lines])
    return shards


def _place_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _described(name: str, param: torch.Tensor) -> str:
    """Shape, dtype and some of a parameter's values: ranks that were seeded differently differ here."""
    kind = f"parameter {name} {tuple(param.shape)} {param.dtype}"
    if param.is_meta:
        return f"{kind} on meta"
    return (
        f"{kind} with values {fingerprint(param)} (if only these differ: seed all ranks alike before the model is built, or "
        "load the same weights)"
    )


def _check_arguments(
    model: Any,
    world_size: Any,
    mesh: Any,
    limits: Any,
    costs: Any,
    leaf_modules: Any,
    timeout: Any,
    accumulate: Any,
    precision: Any,
    replicas: Any,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"zfx.compile takes an nn.Module, got {type(model).__name__}")
    if limits is not None and not isinstance(limits, Limits):
        raise TypeError(f"limits must be a zfx.Limits, got {type(limits).__name__}; Limits.from_deepspeed reads a DeepSpeed config")
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1):
        raise ValueError(f"world_size must be a whole number of at least 1, got {world_size!r}")
    if replicas is not None and (isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1):
        raise ValueError(f"replicas must be a whole number of at least 1, got {replicas!r}")
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(f"precision must be a zfx.Precision, got {type(precision).__name__}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a whole number of micro-batches, at least 1, got {accumulate!r}")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh is not None and mesh.ndim > 2:
        raise ValueError(f"mesh must have one dimension (shard) or two (replicate x shard), got {mesh.ndim}: {mesh}")
    if costs is not None and not isinstance(costs, (CostModel, str, os.PathLike)):
        raise TypeError(f"costs must be a zfx.CostModel or the path of one, got {type(costs).__name__}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 30 * 86_400:
        raise ValueError(f"timeout must be a number of seconds above 0 and at most 30 days, got {timeout!r}")
    if isinstance(leaf_modules, (str, type, nn.Module)) or not isinstance(leaf_modules, Iterable):
        raise TypeError(f"leaf_modules must be a list of module classes or modules, got {leaf_modules!r}")


def _check_resharding(reshard_after_forward: Any) -> None:
    if reshard_after_forward is None or (
        isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool) and reshard_after_forward > 1
    ):
        return
    advice = {
        True: ": FSDP2's True is what zfx does by itself",
        False: ": to keep parameters for the backward, give room by limits=zfx.Limits(max_reuse_distance=...)",
    }.get(reshard_after_forward if isinstance(reshard_after_forward, bool) else None, "")  # type: ignore[arg-type]
    raise ValueError(f"reshard_after_forward must be a number of ranks, at least 2, got {reshard_after_forward!r}{advice}")


def _check_planning(passes: Any, uniform: Any) -> None:
    if not isinstance(passes, (list, tuple)):
        raise TypeError(
            f"passes must be a list of functions from Schedule to Schedule, such as [*zfx.passes.PIPELINE, my_pass], got {passes!r}"
        )
    for run in passes:
        if not callable(run):
            raise TypeError(f"passes must be functions from Schedule to Schedule, got {run!r}")
    if not passes:
        raise ValueError("passes must name at least one pass; zfx.passes.PIPELINE is the usual list")
    if not isinstance(uniform, bool):
        raise TypeError(f"uniform must be True or False, got {uniform!r}")


def _check_model(model: nn.Module) -> None:
    if "_zfx_engine" in model.__dict__:
        raise ValueError("this model is compiled by zfx already")
    for prefix, module in model.named_modules():
        if module is not model and "_zfx_engine" in module.__dict__:
            raise ValueError(f"the submodule {prefix!r} is compiled by zfx already; compile the outermost model only")
    for param, owners in unique_parameters(model):
        name = owners[0].name
        if isinstance(param, nn.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is not initialised yet: run the lazy module once before zfx.compile")
        if hasattr(param, "_local_tensor"):
            raise ValueError(f"parameter {name!r} is a DTensor already: zfx shards plain parameters")
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name!r} has a hook that was registered before zfx.compile; it would see this rank's shard of "
                f"the gradient instead of all rows. Register hooks after zfx.compile, and let them work on DTensors"
            )
    _check_sparse(model)
    check_aliases(model)


def _check_init(model: nn.Module, init_fn: Any) -> None:
    if init_fn is None:
        return
    if not callable(init_fn):
        raise TypeError(f"init_fn must be a function that takes the model, got {init_fn!r}")
    if not is_on_meta(model):
        raise ValueError(
            "init_fn gives values to a model on the meta device, and this one has its values; build it under torch.device('meta')"
        )


def _check_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(f"{name!r} makes sparse gradients, which can't be reduced to shards: build it with sparse=False")


def find_ranks(
    world_size: int | None, mesh: DeviceMesh | None, replicas: int | None = None
) -> tuple[DeviceMesh | None, int, int]:
    """The mesh to shard over, or None where the model can only be planned; the number of ranks, and of replicas among them."""
    if mesh is None:
        if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            _start_from_torchrun()
        elif not dist.is_initialized() and (world_size or 1) == 1:
            _start_alone()
        if not dist.is_initialized():
            assert world_size is not None
            return None, world_size, _divided(world_size, replicas or 1)
        num_replicas = _divided(dist.get_world_size(), replicas or 1)
        num_shards = dist.get_world_size() // num_replicas
        mesh = init_device_mesh(_device_type(), (num_shards,) if num_replicas == 1 else (num_replicas, num_shards))
    if world_size is not None and world_size != mesh.size():
        raise ValueError(f"world_size={world_size}, but the process group has {mesh.size()} ranks")
    found = mesh.size(0) if mesh.ndim == 2 else 1
    if replicas is not None and replicas != found:
        raise ValueError(f"replicas={replicas}, but the mesh has {found}: {mesh}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}: only its ranks may call zfx.compile")
    if any(not torch.equal(mesh.mesh, mesh.mesh.sort(dim).values) for dim in range(mesh.ndim)):
        raise ValueError(f"the mesh must name ranks in ascending order along each dimension, got {mesh}")
    return mesh, mesh.size(), found


def smaller_group(reshard_after_forward: int | None, num_shards: int) -> int:
    """`Program.reshard_to` for a number of ranks that parameters are resharded over; 0 where those are all that there are.

    Raises:
        ValueError: the number does not divide the ranks.
    """
    if reshard_after_forward is None or reshard_after_forward == num_shards:
        return 0
    if num_shards % reshard_after_forward:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} does not divide the {num_shards} ranks that parameters are sharded over"
        )
    return reshard_after_forward


def _divided(world_size: int, replicas: int) -> int:
    if world_size % replicas:
        raise ValueError(f"{world_size} ranks can't be divided among replicas={replicas}")
    return replicas


def _start_from_torchrun() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")


def _start_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))


def _device_type() -> str:
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device(mesh.device_type)
