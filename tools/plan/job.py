"""What is planned."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from evisrag_jax.models.qwen25vl.config import Qwen25VLConfig

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Job:
    """One training job. Sizes are those of the configs.

    data, fsdp, tensor: the mesh.  prompts: P an update.  micro: prompts a slice on each device, 0 for all.
    prompt, response, group: L, T, G.  pages, page_tokens: images a prompt and merged tokens an image.
    slots: responses decoded at once a process, 0 for all; processes: how many.  rollout_tensor: devices of a
    sampling copy, 0 for `tensor`.  lora_rank: 0 for training all of the decoder.  blocked: whether
    attention takes its CPU form, which holds no block of scores (see models/attention.py).  fused: whether
    prompts' attention is cuDNN's.
    """

    model: Qwen25VLConfig
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    processes: int = 1
    method: str = "rl"
    prompts: int = 32
    micro: int = 1
    group: int = 8
    prompt: int = 10752
    response: int = 1536
    pages: int = 5
    page_tokens: int = 2048
    param: str = "float32"
    compute: str = "bfloat16"
    moments: str = "float32"
    remat: str = "full"
    chunk: int = 2048
    slots: int = 0
    rollout_tensor: int = 0
    lora_rank: int = 0
    blocked: bool = False
    fused: bool = True
    channels: int = field(default=3)

    def __post_init__(self) -> None:
        if self.prompts % self.shards:
            raise ValueError(f"{self.prompts} prompts do not divide over {self.shards} devices")
        own = self.prompts // self.shards
        if self.micro and own % min(self.micro, own):
            raise ValueError(f"micro={self.micro} does not divide the {own} prompts of a device")

    @property
    def shards(self) -> int:
        """Devices that share the prompts."""
        return self.data * self.fsdp

    @property
    def devices(self) -> int:
        return self.shards * self.tensor

    @property
    def rows(self) -> int:
        """Prompts of a slice on one device."""
        own = self.prompts // self.shards
        return min(self.micro, own) or own

    @property
    def slices(self) -> int:
        return self.prompts // self.shards // self.rows

    @property
    def copy_devices(self) -> int:
        """Devices that a sampling copy is split over."""
        return self.rollout_tensor or self.tensor

    @property
    def local_slots(self) -> int:
        """Responses decoded at once by the devices of one sampling copy."""
        copies = self.devices // self.processes // self.copy_devices
        own = math.ceil(self.prompts / self.processes / copies) * self.group
        return min(own, math.ceil(self.slots / copies)) if self.slots else own

    def change(self, **fields) -> Job:
        """The job with other fields."""
        return dataclasses.replace(self, **fields)
