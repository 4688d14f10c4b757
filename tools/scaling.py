#!/usr/bin/env python
"""Bytes that a training step moves between devices, read from the compiled program's collectives, and what they cost
at 8, 64 and 512 GPUs.

    python tools/scaling.py            the tables of docs/scaling.md (a minute; eight virtual CPU devices)

The real RL update and the real copy for sampling are compiled for small models on meshes of eight devices; their
collectives are counted in units of W (kernels of all layers) and E (one table of the vocabulary). The counts do not
depend on sizes (two widths and two depths are compared), so they are evaluated at the published ones.
"""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)


def main() -> int:
    """Prints both tables."""
    from plan.traffic import derived, evaluated

    print(derived(), end="\n\n")
    print(evaluated())
    return 0


if __name__ == "__main__":
    sys.exit(main())
