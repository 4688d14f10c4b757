"""What cards hold, and what of it a job cannot have."""

GIB = 2**30

# Usable memory as the driver reports it, GiB.
DEVICES = {
    "a100-40": 39.4,
    "a100-80": 79.2,
    "h100-80": 79.6,
    "h200-141": 139.8,
    "b200-192": 178.4,
}
CONTEXT = 1.5  # GiB: CUDA context, cuDNN and cuBLAS workspaces, NCCL buffers
FRAGMENTS = 0.06  # of the rest: holes between buffers


def available(memory_gib: float) -> float:
    """Bytes that arrays can take on a card of this memory."""
    return (memory_gib - CONTEXT) * (1 - FRAGMENTS) * GIB
