"""`zfx inspect`, `export` and `import-deepspeed`: checkpoints, in one process and without the model's code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import tables, text
from .cli_base import AsJson, Usage, amount, app, busy

Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a directory of several (the latest is meant), or any DCP directory."),
]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every byte with the checksums.")]


def _found(path: Path) -> Path:
    from .checkpoint_folder import saved_in

    if not path.is_dir():
        raise Usage(f"{path} is not a directory")
    saved = saved_in(path)
    return saved[-1].path if saved else path


@app.command()
def inspect(
    checkpoint: Checkpoint,
    verify: Verify = False,
    full: Annotated[bool, typer.Option("--full", help="Every tensor, and its optimizer state.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds: names, shapes, dtypes, bytes, step, world size. No tensor is read, unless to verify."""
    from .export import contents_of, rows

    path = _found(checkpoint)
    with busy(f"reading {path.name}"):
        contents = contents_of(path, verify)
    found = list(rows(contents))
    optimizer = [t for entries in contents.optimizer.values() for t in entries.values()]
    answer: dict[str, Any] = {
        "path": str(path),
        "step": contents.step,
        "world_size": contents.world_size,
        "verified": verify and contents.step is not None,
        "num_elements": sum(t.num_bytes // t.dtype.itemsize for t in contents.model.values()),
        "model_bytes": sum(t.num_bytes for t in contents.model.values()),
        "optimizer_bytes": sum(t.num_bytes for t in optimizer),
        "config": contents.config,
        "tensors": found,
    }
    if as_json:
        tables.print_json(answer)
    else:
        tables.print_checkpoint(answer, None if full else 20)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory for model.safetensors and config.json.")],
    dtype: Annotated[str | None, typer.Option(help="Cast to it, e.g. bfloat16.")] = None,
    max_shard_size: Annotated[
        int | None, typer.Option(parser=amount, metavar="BYTES", help="Most that one file takes. Default: 50GB.")
    ] = None,
    verify: Verify = True,
    as_json: AsJson = False,
) -> None:
    """Write the model's weights as transformers reads them. Offline, tensor by tensor: never the whole model in memory."""
    from .export import contents_of
    from .export import export as write
    from .plain_state import dtype_of

    path, wanted = _found(checkpoint), None if dtype is None else dtype_of(dtype)
    with busy(f"verifying {path.name}" if verify else f"reading {path.name}"):
        contents = contents_of(path, verify)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Usage(f"{out} is there already and not an empty directory")
    with busy("exporting") as said:
        files = write(contents, out, wanted, max_shard_size or 50 * 10**9, lambda name: said(f"exporting {name}"))
    if as_json:
        tables.print_json({"checkpoint": str(path), "out": str(out), "files": files, "num_tensors": len(contents.model)})
        return
    print(f"wrote {len(contents.model):,} tensors to {out}: {text.printable(', '.join(files))}")
    if contents.config is None:
        print("the checkpoint has no configuration, so there is no config.json")


@app.command("import-deepspeed")
def import_deepspeed(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where DeepSpeed's *_optim_states.pt are, or its parent.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that zfx.Checkpointer loads from.")],
    as_json: AsJson = False,
) -> None:
    """Turn a ZeRO checkpoint of DeepSpeed into one that zfx.Checkpointer loads: weights in float32, and Adam's state."""
    from .deepspeed_checkpoint import convert

    with busy("importing") as said:
        path = convert(directory, out, lambda name: said(f"importing {name}"))
    if as_json:
        tables.print_json({"directory": str(directory), "out": str(path)})
    else:
        print(f"wrote {path}")
