"""What the benchmarks share: shapes as data, both sides on equal weights, alternating times, a report.

    shapes ─case─► model folder, prompts, pages ─┬─ours─► engine, update      ┐
                                                 ├─peer─► transformers, torch ├─timing─► report
                                                 └─trl──► GRPOTrainer         ┘

Imported by the scripts beside this folder; nothing of the package imports it.
"""

import os

# Before torch is imported: threads that spin while they wait take the core of the other side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
