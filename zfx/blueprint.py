"""The blueprint of one compiled model: all that capture, planning and the graphs need to know, and no tensor.

Captured graphs hold it, and torch may hold those for long; so it knows neither the model nor its parameters, and both can die.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch

from .agreement import digest_of
from .bucket import Transfers, gather_whole
from .channels import Channels
from .held import Held
from .ir import Schedule
from .nothing import is_nothing
from .ops import BLUEPRINTS
from .recapture import Signature
from .settings import Settings
from .shard import Layout
from .window import Window

_ids = itertools.count()


class Blueprint:
    """See the module.

    Args:
        model_name: for messages.
        layouts: one a unique parameter, in the order of `unique_parameters`.
        world_size: all ranks; each of the replicas has as many of them.
        channels: None where the model can only be planned.
    """

    def __init__(
        self,
        model_name: str,
        layouts: Sequence[Layout],
        world_size: int,
        settings: Settings,
        channels: Channels | None,
        replicas: int = 1,
    ) -> None:
        self.model_name, self.layouts = model_name, tuple(layouts)
        self.names = tuple(layout.name for layout in layouts)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.world_size, self.settings, self.channels, self.replicas = world_size, settings, channels, replicas
        self.window: weakref.ref[Window] | None = None  # the engine's, where micro-batches are accumulated
        self.held: weakref.ref[Held] | None = None  # the engine's
        self.holds = False  # whether plans leave room for gradients that wait
        self.schedules: list[Schedule] = []
        self.read_in_backward: set[str] = set()  # parameters that the backward of some schedule reads
        self.graphs: list[dict[str, torch.fx.GraphModule]] = []
        self.captured: list[Signature] = []
        self.id = next(_ids)
        BLUEPRINTS[self.id] = self

    def again(self) -> Blueprint:
        """The same for another model of the same shape: nothing captured yet."""
        return Blueprint(self.model_name, self.layouts, self.world_size, self.settings, self.channels, self.replicas)

    def add(self, schedules: Sequence[Schedule]) -> range:
        """Keep the schedules of one captured graph, one a kind of micro-batch, and room for their graphs; their numbers."""
        self.schedules += schedules
        self.graphs += [{} for _ in schedules]
        steps = schedules[0].program.steps
        self.read_in_backward.update(name for step in steps if step.phase == "backward" for name in step.reads)
        return range(len(self.schedules) - len(schedules), len(self.schedules))

    def agree(self, what: str) -> Channels:
        """Ranks agree on one collective outside a schedule; the channels that it may then use."""
        assert self.channels is not None
        line = f"{what} of {self.model_name}"
        self.channels.agreement.begin(digest_of([line]), [line])
        return self.channels

    def own_rows(self, index: int) -> slice:
        """The rows of parameter `index` that this rank holds; all of a replicated one."""
        layout = self.layouts[index]
        assert self.channels is not None
        return slice(None) if layout.replicated else slice(*layout.rows(self.channels.gathers.rank))

    def gather_whole(self, index: int, shard: torch.Tensor) -> torch.Tensor:
        """A whole parameter as it is stored, in memory of its own. A collective call; ranks have agreed on it before."""
        assert self.channels is not None
        return gather_whole(self.layouts[index], shard, self.channels.gathers)

    def gather_now(self, index: int, shard: torch.Tensor) -> torch.Tensor:
        """What the naive all_gather does."""
        channels = self.agree(f"all_gather {self.names[index]}")
        value = Transfers([self.layouts[index]], [False]).all_gather(channels.gathers, [shard]).wait()[0]
        return value.clone() if self.layouts[index].replicated else value  # an operator must not return its input

    def held_bytes(self) -> dict[str, int]:
        """By parameter: what is held of its gradient where it waits."""
        return {layout.name: layout.numel * layout.held_dtype.itemsize for layout in self.layouts}

    def reduce_held(self, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The shards of gradients that waited, and that the last backward did not complete. By index; a collective call."""
        if not values:
            return {}
        assert self.channels is not None
        lines = [f"reduction of what waited: {', '.join(self.names[i] for i in values)} of {self.model_name}"]
        agreement, missing = self.channels.agreement, [is_nothing(grad) for grad in values.values()]
        votes = agreement.begin(digest_of(lines), lines, any(missing))
        shards = _reduced(self.channels, [self.layouts[i].of_held() for i in values], list(values.values()))
        nobody = agreement.everywhere(missing, lines) if votes else missing
        return {i: shard for i, shard, gone in zip(values, shards, nobody) if not gone}

    def reduce_now(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """What the naive reduce_scatter does."""
        channels = self.agree(f"reduce_scatter {self.names[index]}")
        (shard,) = _reduced(channels, [self.layouts[index]], [grad])
        return shard.clone() if self.world_size == 1 else shard


def _reduced(channels: Channels, layouts: Sequence[Layout], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of the means, at once."""
    transfers = Transfers(layouts, [False] * len(layouts))
    reduced = transfers.reduce_scatter(channels.reductions, grads).wait()
    if channels.across is not None:
        reduced = transfers.all_reduce(channels.across, reduced).wait()
    return reduced.split()
