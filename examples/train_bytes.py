"""Train a byte-level GPT with ZeRO-3 on the sources of Python's standard library.

    python examples/train_bytes.py                              # starts its own ranks: one per GPU, else two on the CPU
    torchrun --nproc-per-node 4 examples/train_bytes.py         # or under torchrun, on any number of ranks

All that is particular to zfx stands in `train`: one call before an ordinary training loop, and what `model.zfx` tells after it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import zfx
from zfx.replay import replay

VOCABULARY = 256  # bytes
EVALUATION_BATCHES = 32  # a rank


# The model: a GPT as anyone would write it.


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class ByteGPT(nn.Module):
    """Bytes (batch, time) in, logits of the next byte (batch, time, 256) out."""

    def __init__(self, layers: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def example(batch: int = 4, seq: int = 64) -> tuple[nn.Module, Tensor]:
    """What `zfx plan train_bytes --world-size 8` plans: the model of the default settings, without weights, and its input."""
    with torch.device("meta"):
        return ByteGPT(layers=6, dim=192, heads=6, context=seq), torch.zeros(batch, seq, dtype=torch.long)


# The data: text that is on every machine with Python.


def read_corpus(max_bytes: int) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes: about one file in twenty is held out. Files are taken in the order of a hash of their name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}  # not ours, or generated
    files = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not skipped.intersection(name.parts) and path.stat().st_size < 200_000:
            files[hashlib.sha256(name.as_posix().encode()).digest()] = path
    train, held_out = bytearray(), bytearray()
    for digest, path in sorted(files.items()):
        if len(train) + len(held_out) < max_bytes:
            part = held_out if digest[-1] % 20 == 0 else train
            part += path.read_bytes()
    if min(len(train), len(held_out)) < 20_000:
        sys.exit(f"read {len(train) + len(held_out):,} bytes of Python sources in {root}: too few to train on")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def draw(text: Tensor, batch: int, context: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the same one byte later."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    window = text[starts + torch.arange(context + 1)].long().to(device)
    return window[:, :-1], window[:, 1:]


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte of the best guess that looks at no context."""
    share = torch.bincount(text.int(), minlength=VOCABULARY).double() / len(text)
    return -torch.special.xlogy(share, share).sum().item()


# Evaluation and sampling. The model's collectives run inside: every rank makes the same calls.


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, args: argparse.Namespace, device: torch.device) -> float:
    """Mean nats per byte over windows that differ by rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    total = torch.zeros((), device=device)
    for _ in range(EVALUATION_BATCHES):
        tokens, targets = draw(text, args.batch, args.context, generator, device)
        total += cross_entropy(model(tokens), targets)
    dist.all_reduce(total)
    return total.item() / (EVALUATION_BATCHES * dist.get_world_size())


@torch.no_grad()
def sample(model: nn.Module, prompt: str, num_bytes: int, context: int, device: torch.device) -> str:
    """Continue the prompt. The input is always one row of `context` bytes, so that one compiled graph serves all lengths."""
    generator = torch.Generator().manual_seed(0)
    text = list(prompt.encode())
    for _ in range(num_bytes):
        recent = text[-context:]
        row = torch.tensor([recent + [0] * (context - len(recent))], device=device)  # attention is causal: padding is never seen
        probabilities = torch.softmax(model(row)[0, len(recent) - 1].float().cpu() / 0.7, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


# What a rank holds.


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors on this rank: of a DTensor, its shard."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def peak_gathered_bytes(schedule: zfx.Schedule) -> int:
    """Most bytes of gathered parameters, packing buffers included, that the schedule ever holds."""
    return max(state.gathered_bytes + state.packing_bytes for state in replay(schedule))


def memory_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    parameters = list(model.parameters())
    full = sum(p.numel() * p.element_size() for p in parameters)
    states = (value for state in optimizer.state.values() for value in state.values())
    rows = {
        "parameters": (num_bytes(parameters), full),
        "gradients": (num_bytes(p.grad for p in parameters if p.grad is not None), full),
        "optimizer": (num_bytes(states), 2 * full),
        "gathered, at the peak": (max(map(peak_gathered_bytes, model.zfx.schedules)), 0),
    }
    rows["sum"] = (sum(zfx_bytes for zfx_bytes, _ in rows.values()), sum(ddp_bytes for _, ddp_bytes in rows.values()))
    lines = [f"{'MB on each rank':<24}{'zfx':>8}{'DDP':>8}"]
    return "\n".join(lines + [f"{name:<24}{ours / 1e6:>8.2f}{theirs / 1e6:>8.2f}" for name, (ours, theirs) in rows.items()])


# Training.


def rate(step: int, steps: int, warmup: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(args: argparse.Namespace) -> None:
    started = time.perf_counter()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    model: nn.Module = ByteGPT(args.layers, args.dim, args.heads, args.context).to(device)

    limits = zfx.Limits(
        max_live_parameters=args.max_live, max_reuse_distance=args.max_reuse_distance, param_persistence_threshold=args.dim
    )
    model = zfx.compile(model, args.world_size, limits=limits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps, args.warmup))

    text, held_out = read_corpus(args.max_bytes)
    generator = torch.Generator().manual_seed(args.seed * 1009 + dist.get_rank())  # every rank draws other windows
    bytes_per_step = args.batch * args.context * model.zfx.world_size
    first = dist.get_rank() == 0
    with tqdm(total=args.steps * bytes_per_step, unit="B", unit_scale=True, mininterval=0.5, disable=not first) as bar:
        for step in range(args.steps):
            tokens, targets = draw(text, args.batch, args.context, generator, device)
            loss = cross_entropy(model(tokens), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 10 == 0 and first:
                bar.set_postfix_str(f"loss {loss.item():.2f} nats/byte", refresh=False)
            bar.update(bytes_per_step)

    model.eval()
    loss_held_out = evaluate(model, held_out, args, device)
    written = None if args.no_sample else sample(model, args.prompt, args.sample_bytes, args.context, device)
    if first:
        print(f"\nheld-out loss   {loss_held_out:.3f} nats/byte (guessing by frequency alone: {unigram_entropy(held_out):.3f})")
        if written is not None:
            print(f"\n--- sample\n{written}\n---")
        print(f"\n{memory_table(model, optimizer)}\n\n{model.zfx.report()}\n")
        args.out.mkdir(parents=True, exist_ok=True)
        for name in ("schedule.json", "schedule.dot"):
            model.zfx.dump(args.out / name)
        print(f"wrote {args.out / 'schedule.json'} and {args.out / 'schedule.dot'}; {time.perf_counter() - started:.0f} s in all")
    dist.destroy_process_group()


# The command line, and starting ranks where torchrun has not.


def whole(text: str) -> int:
    """A whole number above 0; 3e6 and 1_000 are fine."""
    value = float(text)
    if value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return int(value)


def whole_or_zero(text: str) -> int:
    return 0 if text.strip() == "0" else whole(text)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=whole, default=500, help="optimizer steps (%(default)s)")
    add("--layers", type=whole, default=6, help="transformer blocks (%(default)s)")
    add("--dim", type=whole, default=192, help="width of the model, a multiple of --heads (%(default)s)")
    add("--heads", type=whole, default=6, help="attention heads (%(default)s)")
    add("--context", type=whole, default=64, help="bytes that the model sees at once (%(default)s)")
    add("--batch", type=whole, default=4, help="windows of --context bytes in a step, on each rank (%(default)s)")
    add("--lr", type=positive, default=1.5e-3, help="peak learning rate of AdamW (%(default)s)")
    add("--warmup", type=whole, default=40, help="steps until the learning rate peaks (%(default)s)")
    add("--seed", type=whole_or_zero, default=0, help="of the initial parameters and of the data's order (%(default)s)")
    add("--max-bytes", type=whole, default=8_000_000, help="most bytes of text to read (%(default)s)")
    add("--max-live", type=whole, default=1_000_000, help="most elements of gathered parameters held at any moment (%(default)s)")
    reuse = "keep a gathered parameter for its next use if at most so many elements are read first; 0: gather again (%(default)s)"
    add("--max-reuse-distance", type=whole_or_zero, default=0, help=reuse)
    add("--world-size", type=whole, help="ranks to start (one per GPU, else 2); under torchrun, torchrun's number")
    add("--out", type=Path, default=Path("out"), help="folder for schedule.json and schedule.dot (%(default)s)")
    add("--prompt", default="def ", help="what the sample starts with (%(default)r)")
    add("--sample-bytes", type=whole, default=200, help="length of the sample (%(default)s)")
    add("--no-sample", action="store_true", help="generate no text at the end")
    args = parser.parse_args()
    launched = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    if launched is not None and args.world_size not in (None, launched):
        parser.error(f"--world-size {args.world_size}, but torchrun started {launched} ranks")
    args.world_size = args.world_size or launched or torch.cuda.device_count() or 2
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} is not a multiple of --heads {args.heads}")
    if not args.prompt:
        parser.error("--prompt must not be empty")
    return args


def worker(rank: int, args: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    train(args)


def launch(args: argparse.Namespace) -> None:
    """Start the ranks on this machine and wait. The first failure ends all, with its traceback and exit code 1."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one, held until the end
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), WORLD_SIZE=str(args.world_size))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks join that store instead of opening one
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.world_size)))
    ranks = mp.start_processes(worker, (args,), args.world_size, join=False, daemon=True, start_method="spawn")
    try:
        while not ranks.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    arguments = parse_arguments()
    if "RANK" in os.environ:
        train(arguments)
    else:
        launch(arguments)
