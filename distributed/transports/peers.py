"""Copies between the GPUs of a node: by copy engines, or by a kernel (swap.cu).

Copy engines take no multiprocessors. Copies by them work as follows.
Each rank has a mailbox in the memory of its GPU, which all ranks of its node map (CUDA IPC). A
mailbox has two slots for each other rank of the node, and 32-bit words, two for each slot:

- "full", in the receiver's mailbox: the slot holds a piece that the receiver has not copied;
- "in use", in the sender's mailbox: the receiver has not yet taken the piece from the slot.

A message travels in pieces. The sender waits until the slot is not in use, marks it in use, copies
the piece to the slot of the receiver's mailbox, and writes "full" there. The receiver waits for
"full", copies the piece to its array, clears "full", and clears "in use" in the sender's mailbox.

Streams wait for words and write them. Neither the host nor a kernel takes part, and a CUDA graph
may capture all steps. Each rank sends one piece and receives one piece in turns, so pieces advance
even if all streams of a GPU share one queue.

If a node has two ranks, a kernel (swap.cu) exchanges small arrays, because a small copy by a copy
engine spends most of its time between its steps. The kernel writes to the other GPU, and waits for
the arrays of the other GPU.

`Copies.take` decides which messages are copied; NCCL sends the others. `Copies.run` chooses between
copy engines and the kernel. mailboxes.py has the memory of GPUs and the operations on streams.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

SLOTS = 2  # for each sender
SLOTS_BYTES = 2**25  # of all slots in a mailbox
# The least bytes of a message that is copied, if a node has more than two ranks. NCCL sends smaller
# messages, because a small copy spends most of its time between its steps
LEAST_COPY_BYTES = 2**20
# If a node has two ranks, a kernel swaps up to this number of bytes, and of arrays, in each
# direction. Copy engines carry larger messages, and messages of more arrays
MOST_SWAP_BYTES, MOST_SWAP_ARRAYS = 2**20, 4
SWAP_BLOCKS = 16  # thread blocks of swap.cu
WORD_BYTES, LINE_BYTES = 4, 256  # of a word; the alignment of slots, of parts and of buffers
PATIENCE = 10.0  # seconds to wait for the test messages, and for abandoned work
AT_LEAST, EQUAL = 0, 1  # how a stream compares a word with a number; CUDA's numbers

# (number of the array, first byte in the array, bytes, offset in the slot) of a part of a piece
Part = tuple[int, int, int, int]


@dataclass(frozen=True)
class Swap:
    """The sizes of one exchange by copies: bytes of each array that is sent or received."""

    to: int  # the rank that gets the sent arrays
    sent: tuple[int, ...]
    source: int  # the rank from which arrays are received
    received: tuple[int, ...]


@functools.cache
def divide_into_pieces(sizes: tuple[int, ...], slot_bytes: int) -> list[list[Part]]:
    """Divide arrays of these sizes, in bytes, into pieces for slots of `slot_bytes`.

    `slot_bytes` and the offsets in a slot are multiples of `LINE_BYTES`.
    """
    pieces: list[list[Part]] = []
    free = 0  # bytes of the last piece's slot
    for array, size in enumerate(sizes):
        first = 0
        while first < size:
            if not free:
                pieces.append([])
                free = slot_bytes
            part_bytes = min(size - first, free)
            pieces[-1].append((array, first, part_bytes, slot_bytes - free))
            first += part_bytes
            free -= -(-part_bytes // LINE_BYTES) * LINE_BYTES
    return pieces


class Copies:
    """Copies between this rank and the other ranks of its node, by copy engines or by swap.cu.

    `mailboxes` has the address, in this process, of the mailbox of each rank of the node. `device`
    is a `mailboxes.StreamOperations`. A mailbox has these parts, in this order:

    - words "full", one for each slot (`word_bytes`);
    - words "in use", one for each slot of this rank in another mailbox (`word_bytes`);
    - slots of `slot_bytes`, SLOTS for each other rank;
    - from `channel` on, the memory of swap.cu: two buffers of MOST_SWAP_BYTES; and for each thread
      block two numbers of swaps: of the last swap whose arrays have arrived, and of the last swap
      that the thread block has made.
    """

    def __init__(self, rank: int, mailboxes: dict[int, int], device: Any) -> None:
        self.rank, self.mailboxes, self.device = rank, mailboxes, device
        self.ranks = list(mailboxes)
        # the other rank, if the node has two ranks
        self.partner = next(r for r in self.ranks if r != rank) if len(self.ranks) == 2 else None
        self.word_bytes = -(-len(self.ranks) * SLOTS * WORD_BYTES // LINE_BYTES) * LINE_BYTES
        slot_count = SLOTS * (len(self.ranks) - 1)
        self.slot_bytes = SLOTS_BYTES // slot_count // LINE_BYTES * LINE_BYTES
        self.channel = 2 * self.word_bytes + self.slot_bytes * slot_count

    def take(self, rank: int, size: int) -> bool:
        """Whether a message of `size` bytes to or from `rank` is copied, and not sent by NCCL.

        A message is copied if both of these hold: `rank` is another rank of this node; and the node
        has two ranks, or the message has at least `LEAST_COPY_BYTES`.
        """
        on_this_node = rank in self.mailboxes and rank != self.rank
        return on_this_node and (size >= LEAST_COPY_BYTES or self.partner is not None)

    def run(self, swaps: Sequence[Swap], addresses: Sequence[int], stream: Any) -> None:
        """Queue swaps on the stream.

        The kernel swap.cu makes a swap if the node has two ranks, and each direction has at most
        MOST_SWAP_ARRAYS arrays, which fit the kernel's buffer (`padded_bytes`). Copy engines make
        all other swaps.
        `addresses` has, for each swap, the addresses of sent arrays and then of received arrays.
        All ranks call this with matching swaps in the same order.
        """
        first = 0
        for swap in swaps:
            middle = first + len(swap.sent)
            last = middle + len(swap.received)
            outgoing, incoming = addresses[first:middle], addresses[middle:last]
            first = last
            if (
                self.partner is not None
                and max(map(padded_bytes, (swap.sent, swap.received))) <= MOST_SWAP_BYTES
            ):
                # `swap.to` or `swap.source` may be on another node. The kernel copies nothing to or
                # from that rank. Both partners still launch it, for the arrays of the other
                # direction
                sides = (self.mailboxes[r] + self.channel for r in (self.partner, self.rank))
                self.device.swap(stream, swap, outgoing, incoming, *sides)
                continue
            turns = zip_longest(
                divide_into_pieces(swap.sent, self.slot_bytes),
                divide_into_pieces(swap.received, self.slot_bytes),
            )
            for turn, (sent, received) in enumerate(turns):
                if sent is not None:
                    self._send(swap.to, turn % SLOTS, sent, outgoing, stream)
                if received is not None:
                    self._receive(swap.source, turn % SLOTS, received, incoming, stream)

    def release(self, done: Callable[[], bool], patience: float = PATIENCE) -> None:
        """End the waits of this rank's streams for words, after an error or a timeout.

        Other ranks may never write these words. So this rank writes into its own mailbox that all
        slots are full, that no slot is in use, and that later swaps have arrived. It writes again
        and again, until `done()` is true or `patience` seconds have passed.
        """
        mailbox, end = self.mailboxes[self.rank], time.monotonic() + patience
        arrived = mailbox + self.channel + 2 * MOST_SWAP_BYTES
        while not done() and time.monotonic() < end:
            self.device.fill(mailbox, 1, self.word_bytes)
            self.device.fill(self.in_use, 0, self.word_bytes)
            # 0x7F7F7F7F is above the number of any swap
            self.device.fill(arrived, 0x7F, SWAP_BLOCKS * WORD_BYTES)
            time.sleep(1e-3)

    def _send(
        self, to: int, slot: int, parts: Sequence[Part], arrays: Sequence[int], stream: Any
    ) -> None:
        """Queue the copy of a piece to a slot of rank `to`. `arrays` are addresses."""
        device, in_use = self.device, self._in_use_address(self.rank, to, slot)
        device.wait(stream, in_use, 0, EQUAL)
        device.write(stream, in_use, 1)
        slot_address = self._slot_address(to, self.rank, slot)
        for array, first, size, offset in parts:
            device.copy(stream, slot_address + offset, arrays[array] + first, size)
        device.write(stream, self._full_address(to, self.rank, slot), 1)

    def _receive(
        self, source: int, slot: int, parts: Sequence[Part], arrays: Sequence[int], stream: Any
    ) -> None:
        """Queue the copy of a piece of rank `source` from a slot of this rank."""
        device, full = self.device, self._full_address(self.rank, source, slot)
        # AT_LEAST, because `release` sets each byte of the word to 1: then the word is 0x01010101
        device.wait(stream, full, 1, AT_LEAST)
        slot_address = self._slot_address(self.rank, source, slot)
        for array, first, size, offset in parts:
            device.copy(stream, arrays[array] + first, slot_address + offset, size)
        device.write(stream, full, 0)
        device.write(stream, self._in_use_address(source, self.rank, slot), 0)

    # -- addresses in the mailbox of `owner`

    @property
    def in_use(self) -> int:
        """Address of the words "in use" in this rank's mailbox: a word is 1 while the receiver
        has not taken this rank's piece from the slot."""
        return self.mailboxes[self.rank] + self.word_bytes

    def _full_address(self, owner: int, source: int, slot: int) -> int:
        """Address of the word that is 1 while the owner's slot holds a piece from `source`."""
        return self.mailboxes[owner] + WORD_BYTES * (SLOTS * self.ranks.index(source) + slot)

    def _in_use_address(self, owner: int, to: int, slot: int) -> int:
        """Address of the word that is 1 while `to` has not taken the owner's piece from a slot."""
        return self._full_address(owner, to, slot) + self.word_bytes

    def _slot_address(self, owner: int, source: int, slot: int) -> int:
        """Address of the owner's slot for pieces from `source`. Slots are in the order of their
        senders, from the rank after the owner on."""
        distance = self.ranks.index(source) - self.ranks.index(owner)
        source_index = (distance - 1) % len(self.ranks)
        offset = 2 * self.word_bytes + self.slot_bytes * (SLOTS * source_index + slot)
        return self.mailboxes[owner] + offset


def padded_bytes(sizes: tuple[int, ...]) -> int:
    """Bytes that arrays of these sizes take in a buffer of swap.cu, which pads each to 16 bytes.

    For more than MOST_SWAP_ARRAYS arrays: a number of bytes that the buffer does not have.
    """
    if len(sizes) > MOST_SWAP_ARRAYS:
        return MOST_SWAP_BYTES + 1
    return sum(-(-size // 16) * 16 for size in sizes)
