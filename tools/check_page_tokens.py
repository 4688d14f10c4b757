"""Compares visual token counts of every page in a folder with transformers' image processor.

    python tools/check_page_tokens.py PAGES [--model FOLDER]

Prints one line a difference and a total; exit status 1 when any page differs. The budget is that of
the model folder's preprocessor_config.json, else the published 3B model's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image
from rich.progress import track
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from evisrag_jax.pages.decode import load_page
from evisrag_jax.pages.plan import BUDGETS, VisionLayout, plan_resize, processor_settings

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    budget, layout = BUDGETS["default"], VisionLayout()
    if args.model:
        budget, layout = processor_settings(args.model)
    processor = Qwen2VLImageProcessorPil(min_pixels=budget.min_pixels, max_pixels=budget.max_pixels)
    files = sorted(p for p in args.pages.rglob("*") if p.suffix.lower() in ENDINGS)
    different = total = 0
    for path in track(files, description="pages"):
        image: Image.Image = load_page(path)
        ours = plan_resize(image.height, image.width, budget, layout, name=str(path)).tokens
        grid = processor(images=[image], return_tensors="np")["image_grid_thw"][0]
        theirs = int(grid.prod()) // layout.merge**2
        total += ours
        if ours != theirs:
            different += 1
            print(f"{path}: {ours} here, {theirs} there")
    print(f"{len(files)} pages, {total} visual tokens, {different} pages differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
