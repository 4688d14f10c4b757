"""Who sits where while a batch of groups is decoded: plain host code over small integers.

    prompts waiting ─► rows (a prompt's keys and values in residence) ─► slots (one response each)

A finished response frees its slot for the next sample of a resident prompt; a prompt whose samples are
all done frees its row for the next prompt. Prompts and samples are seated in order, so with enough
rows and slots nothing ever waits. Rows and slots are divided over the shards of a mesh: a slot only
reads rows of its own shard.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int32


@dataclass(frozen=True)
class Seat:
    """Response `sample` of `prompt` in a slot; `row` is where its prompt is. All count from 0."""

    shard: int
    slot: int
    row: int
    prompt: int
    sample: int


@dataclass
class _Row:
    prompt: int = -1  # -1: free
    started: int = 0
    running: int = 0


@dataclass
class Schedule:
    """The state of a run of `prompts` × `group` responses over shards × rows and shards × slots."""

    prompts: int
    group: int
    shards: int
    rows: int
    slots: int
    _next: int = 0
    _rows: list[list[_Row]] = field(init=False, repr=False)
    _seats: list[list[Seat | None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if min(self.group, self.shards, self.rows, self.slots) < 1:
            raise ValueError("group, shards, rows and slots are at least 1")
        self._rows = [[_Row() for _ in range(self.rows)] for _ in range(self.shards)]
        self._seats = [[None] * self.slots for _ in range(self.shards)]

    @property
    def width(self) -> int:
        """Slots that one prompt can hold at once."""
        return min(self.group, self.slots)

    @property
    def running(self) -> int:
        """Responses in slots."""
        return sum(seat is not None for shard in self._seats for seat in shard)

    @property
    def waiting(self) -> bool:
        """Whether a response has not been seated yet."""
        return self._next < self.prompts or any(
            row.prompt >= 0 and row.started < self.group for shard in self._rows for row in shard
        )

    def enter(self, limit: int) -> list[tuple[int, int, int]]:
        """Next prompts as (shard, row, prompt), at most `limit` a shard: those for which there are a
        free row and a slot that no resident prompt wants. They count as resident from now on."""
        entered = []
        for _ in range(limit):
            for shard in range(self.shards):
                if self._next >= self.prompts:
                    return entered
                free = next((i for i, r in enumerate(self._rows[shard]) if r.prompt < 0), None)
                if free is None or self._spare(shard) <= 0:
                    continue
                self._rows[shard][free] = _Row(prompt=self._next)
                entered.append((shard, free, self._next))
                self._next += 1
        return entered

    def _spare(self, shard: int) -> int:
        """Free slots beyond those that waiting samples of resident prompts take."""
        wanted = sum(self.group - r.started for r in self._rows[shard] if r.prompt >= 0)
        return self._seats[shard].count(None) - wanted

    def seat(self) -> list[Seat]:
        """Fills free slots with the next samples of resident prompts, the earliest prompt first."""
        new = []
        for shard, seats in enumerate(self._seats):
            order = sorted(
                (i for i, row in enumerate(self._rows[shard]) if row.prompt >= 0),
                key=lambda i: self._rows[shard][i].prompt,
            )
            jobs = (
                (i, sample)
                for i in order
                for sample in range(self._rows[shard][i].started, self.group)
            )
            free = (slot for slot, seat in enumerate(seats) if seat is None)
            # Slots first: zip takes from its first argument before it finds the second one empty.
            for slot, (i, sample) in zip(free, jobs, strict=False):
                row = self._rows[shard][i]
                seats[slot] = Seat(shard, slot, i, row.prompt, sample)
                new.append(seats[slot])
                row.started += 1
                row.running += 1
        return new

    def leave(self, done: Bool[np.ndarray, "Z S"]) -> list[Seat]:
        """Frees the slots of finished responses, and the rows whose last response that was."""
        left = []
        for shard, slot in np.argwhere(done):
            seat = self._seats[shard][slot]
            if seat is None:
                continue
            left.append(seat)
            self._seats[shard][slot] = None
            row = self._rows[shard][seat.row]
            row.running -= 1
            if row.running == 0 and row.started == self.group:
                self._rows[shard][seat.row] = _Row()
        return left

    def shrink(self, slots: int) -> Int32[np.ndarray, "Z S"]:
        """Moves everybody into the first `slots` slots; returns the old slot of each new one. New slots
        that stay free come from free ones: what is copied there is done.

        Raises ValueError when a shard holds more responses than that.
        """
        index = np.zeros((self.shards, slots), np.int32)
        for shard, seats in enumerate(self._seats):
            kept = [seat for seat in seats if seat is not None]
            if len(kept) > slots:
                raise ValueError(f"{len(kept)} responses do not fit {slots} slots")
            free = [slot for slot, seat in enumerate(seats) if seat is None]
            index[shard] = ([seat.slot for seat in kept] + free)[:slots]
            moved = [
                Seat(shard, i, seat.row, seat.prompt, seat.sample) for i, seat in enumerate(kept)
            ]
            self._seats[shard] = [*moved, *[None] * (slots - len(kept))]
        self.slots = slots
        return index

    def most_running(self) -> int:
        """Responses in the fullest shard."""
        return max(sum(seat is not None for seat in shard) for shard in self._seats)

    def plan(
        self, width: int
    ) -> tuple[Int32[np.ndarray, "Z R W"], Int32[np.ndarray, "Z S"], Int32[np.ndarray, "Z S"]]:
        """(members [Z, R, W], row [Z, S], place [Z, S]): see `models.decode_attention.Seats`."""
        members = np.full((self.shards, self.rows, width), self.slots, np.int32)
        row = np.zeros((self.shards, self.slots), np.int32)
        place = np.zeros((self.shards, self.slots), np.int32)
        for shard, seats in enumerate(self._seats):
            taken = [0] * self.rows
            for seat in seats:
                if seat is not None:
                    members[shard, seat.row, taken[seat.row]] = seat.slot
                    row[shard, seat.slot] = seat.row
                    place[shard, seat.slot] = taken[seat.row]
                    taken[seat.row] += 1
        return members, row, place
