"""The options that every CPU benchmark has, and where its model folder lives."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .shapes import CPU_SHAPES, SHAPES, Shape


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with --shape, --tiny, --json, --repeats, --threads and --seed; `doc` is the help."""
    out = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument(
        "--shape", choices=CPU_SHAPES, default="rag-cpu", help="model and sizes (default rag-cpu)"
    )
    out.add_argument(
        "--tiny", action="store_true", help="the tiny shape: seconds, to see that all works"
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="write ratios and raw times here")
    out.add_argument("--repeats", type=int, default=5, help="timed runs a side (default 5)")
    out.add_argument(
        "--threads",
        type=int,
        default=2,
        help="CPUs of this process, and so threads of each side; 0 = all (default 2)",
    )
    out.add_argument("--seed", type=int, default=0, help="of weights, prompts and pages")
    return out


def shape_of(args: argparse.Namespace) -> Shape:
    """The shape asked for."""
    return SHAPES["tiny" if args.tiny else args.shape]


@contextlib.contextmanager
def model_folder(shape: Shape, seed: int) -> Iterator[Path]:
    """A folder with the shape's random weights, gone afterwards."""
    from .case import write_model

    with tempfile.TemporaryDirectory(prefix="evisrag-bench-") as folder:
        write_model(shape, Path(folder), seed)
        yield Path(folder)
