"""The program of each process in tests/frameworks/test_torch_ranks.py.

`python torch_ranks.py CASES RANK SIZE FOLDER [DEVICE]` runs cases such as "clip,failures" one by
one, and writes the results of each to FOLDER/CASE-RANK.pt, which the test compares with one
process. With DEVICE "cuda", each rank has a GPU, and the process group is of NCCL.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from infonce.distributed import RankError
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import infonce.torch as it
from infonce.torch import inf_cl, lightly, memory_efficient_clip, open_clip, siglip_kernel

SIZES = [5, 9, 2]  # rows of each rank
WIDTH = 6


class Model(torch.nn.Module):
    """Two encoders, a temperature and a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = (torch.nn.Linear(WIDTH, 4, dtype=torch.float64) for _ in range(2))
        self.logit_scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.logit_bias = torch.nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))

    def forward(self, image: Any, text: Any) -> Any:
        sides = [
            torch.nn.functional.normalize(encoder(z), dim=1)
            for encoder, z in ((self.image, image), (self.text, text))
        ]
        # the bias takes part even if the loss has none, because DDP waits for every parameter
        return *sides, self.logit_scale.exp(), self.logit_bias + 0.0 * self.logit_scale


def batches(size: int, steps: int = 4) -> list[list[Any]]:
    """[step][side]: images and texts [rows of all `size` ranks, WIDTH]."""
    generator = torch.Generator().manual_seed(1)
    rows = sum(SIZES[:size])
    return [
        [torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]
        for _ in range(steps)
    ]


def train(loss: str, rank: int, size: int, batch_size: int, device: str = "cpu") -> dict[str, Any]:
    """Losses and parameters of a training: on this rank's rows, or in one process (`size` 1) on the
    rows of `batch_size` ranks."""
    model: Any = Model().to(device)
    kind = {"clip": open_clip.ClipLoss, "siglip": open_clip.SigLipLoss}[loss]
    criterion = kind(rank=rank, world_size=size)
    if size > 1:
        model = DistributedDataParallel(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for batch in batches(batch_size):
        mine = [z.split(SIZES[:size])[rank] if size > 1 else z for z in batch]
        image, text, scale, bias = model(*(z.to(device) for z in mine))
        value = criterion(image, text, scale, bias)  # DDP waits for a gradient of each
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        losses.append(value.detach())
    parameters = {
        name.removeprefix("module."): p.detach().cpu() for name, p in model.named_parameters()
    }
    return {"losses": torch.stack(losses).cpu(), **parameters}


# --- gradient caching -----------------------------------------------------------------------------


CHUNKS = [2, 3]  # rows of a chunk of each rank: three chunks of 5 rows, three of 9
# (loss, way of data parallelism) -> reductions of gradients over ranks: with "ddp" one for each
# encoder, with "fully_shard" one for each sharded module, with "functions" one for each chunk
CACHED = {
    ("clip", "ddp"): 2,
    ("clip", "fully_shard"): 4,
    ("clip", "functions"): 6,
    ("siglip", "ddp"): 2,
    ("siglip", "fully_shard"): 4,
    ("joint", "ddp"): 1,
    ("joint", "fully_shard"): 3,
}


def tower() -> Any:
    """An encoder with dropout, so that chunks have to be encoded twice with the same numbers."""
    layers = (nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 4))
    return nn.Sequential(*layers).double()


class JointModel(nn.Module):
    """Two encoders and a scale in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = tower(), tower()
        self.log_scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, image: Any, text: Any) -> Any:
        return self.image(image), self.text(text), self.log_scale.exp()


def problem(kind: str) -> tuple[Any, list[Any]]:
    """(loss, its encoders: two, or one joint model), with the same parameters every time."""
    torch.manual_seed(0)
    if kind == "joint":
        return lambda image, text, scale, **more: it.clip_loss(
            image, text, scale=scale, normalize=True, **more
        ), [JointModel()]
    criterion = {"clip": it.CLIPLoss, "siglip": it.SigLIPLoss}[kind](
        learnable=True, scale=4.0, normalize=True
    ).double()
    return criterion, [tower(), tower()]


def gradients(*modules: Any) -> list[Any]:
    """The gradients of all parameters; of sharded parameters, all rows."""
    grads = [p.grad for module in modules if isinstance(module, nn.Module)
             for p in module.parameters()]  # fmt: skip
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


class Reductions(TorchDispatchMode):
    """Context that counts reductions of gradients over ranks (`count`)."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.name, self.count = {"fully_shard": "_reduce_scatter"}.get(way, "allreduce"), 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.name in str(call)
        return call(*args, **(kwargs or {}))


def parallel(way: str, module: Any, size: int) -> Any:
    """The module, whose gradients are reduced over ranks."""
    if way != "fully_shard":
        return DistributedDataParallel(module)
    mesh = init_device_mesh("cpu", (size,))
    for layer in module.children():
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def cached(rank: int, size: int, device: str) -> dict[str, Any]:
    """`grad_cache` over ranks: for each of CACHED, (reductions, [loss, gradients])."""
    out: dict[str, Any] = {}
    batch = [side.split(SIZES[:size])[rank] for side in batches(size, 1)[0]]
    group = dist.group.WORLD
    for kind, way in CACHED:
        criterion, modules = problem(kind)
        modules = [parallel(way, module, size) for module in modules]
        encoders: Any = modules[0] if kind == "joint" else modules
        if way == "functions":  # encoders that are functions, so grad_cache sees no modules
            encoders = [lambda z, run=module: run(z) for module in modules]
        if way == "fully_shard" and kind == "clip":
            try:
                it.grad_cache(encoders, batch, criterion, 3, group=group)
            except ValueError as error:
                out["refused"] = str(error)
        torch.manual_seed(10 + rank)  # of dropout
        with Reductions(way) as reductions:
            loss = it.grad_cache(encoders, batch, criterion, CHUNKS[rank], group=group)
        out[f"{kind} {way}"] = reductions.count, [loss, *gradients(*modules, criterion)]
    return out


def cached_alone(kind: str, size: int) -> list[Any]:
    """[loss, gradients] of the rows of all `size` ranks in one process and one graph. Rows are
    encoded in the chunks of the ranks, with the random numbers of the ranks."""
    criterion, encoders = problem(kind)
    chunks: list[Any] = []
    sides = [side.split(SIZES[:size]) for side in batches(size, 1)[0]]
    for rank in range(size):
        torch.manual_seed(10 + rank)
        mine = [side[rank].split(CHUNKS[rank]) for side in sides]
        if kind == "joint":
            chunks += [encoders[0](*chunk) for chunk in zip(*mine, strict=True)]
        else:
            chunks += zip(*[[encoder(z) for z in side] for encoder, side in
                            zip(encoders, mine, strict=True)], strict=True)  # fmt: skip
    image, text, *scales = zip(*chunks, strict=True)
    loss = criterion(torch.cat(image), torch.cat(text), *(scale[0] for scale in scales))
    loss.backward()
    return [loss.detach(), *gradients(*encoders, criterion)]


def memory_efficient(prefix: str) -> dict[str, Any]:
    """Losses of MemoryEfficientCLIP by name: with `prefix` "Distributed" over processes, with ""
    in one process."""
    qwen3 = getattr(memory_efficient_clip, f"{prefix}MemoryEfficientQwen3Loss")(
        0.5, 0.1, True, True
    )
    prefixes = f"{prefix}MemoryEfficientMatryoshkaQwen3Loss"

    def with_own(query: Any, documents: Any) -> Any:
        own = torch.stack([documents.flip(1), query.roll(1, 1)], dim=1)
        return qwen3(query, documents, own)

    return {
        "clip": getattr(memory_efficient_clip, f"{prefix}MemoryEfficientCLIPLoss")(0.5),
        "qwen3": with_own,
        "matryoshka": getattr(memory_efficient_clip, prefixes)((2, 6), None, 0.5, 2.0, True),
    }


def siglip_plus(rows: Any, start: int, total: int, device: str = "cpu") -> Any:
    """The loss of siglip-kernel over `total` rows, `rows` of which begin at `start`; some positives
    are on other processes."""
    number = torch.arange(start, start + len(rows[0]), device=device)
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if (
        len(rows[0]) < total) else {}  # fmt: skip
    loss = siglip_kernel.DistributedSigLIPPlusLoss(0.5, **ranks).to(device)
    out = loss(rows, number % 3, number % 4)
    every = torch.arange(total)
    assert out["n_positives"] == (every[:, None] % 3 == every % 4).sum()
    return out["total_loss"]


def drop_ins(rank: int, size: int, device: str) -> dict[str, Any]:
    """Drop-in replacements that share a batch without `group`: [value, gradients] by name."""
    batch, start = [side.to(device) for side in batches(size, 1)[0]], sum(SIZES[:rank])
    rows = [side[start : start + SIZES[rank]].clone().requires_grad_() for side in batch]
    local = torch.arange(SIZES[rank], device=device).flip(0)  # positives among this rank's keys
    local[0] = -1  # no positive
    losses = {
        "inf_cl": inf_cl.cal_inf_loss(*rows, local, 2.0),
        "lightly": lightly.NTXentLoss(0.5, gather_distributed=True)(*rows),
        "dcl": lightly.DCLLoss(0.5, gather_distributed=True)(*rows),
        "dclw": lightly.DCLWLoss(0.5, gather_distributed=True)(*rows),
        **{name: loss(*rows) for name, loss in memory_efficient("Distributed").items()},
        "siglip": siglip_kernel.DistributedSigLIPLoss(rank=rank, world_size=size)(*rows, 2.0, -1.0),
        "siglip_plus": siglip_plus(rows, start, sum(SIZES[:size]), device),
    }
    bank = lightly.NTXentLoss(0.5, (sum(SIZES), WIDTH), gather_distributed=True).to(device)
    bank(*rows)
    distill = open_clip.DistillClipLoss(rank=rank, world_size=size)
    teacher = [2 * side.detach().flip(1) for side in rows]
    both = distill(*rows, 2.0, *teacher, 1.5)
    messages = []
    calls: list[Any] = [
        *(partial(make(rank=rank, world_size=size + 1), *rows, 2.0)
          for make in (siglip_kernel.DistributedSigLIPLoss, open_clip.ClipLoss)),
        partial(open_clip.ClipLoss(group=dist.group.WORLD), *rows, 2.0),
        partial(inf_cl.cal_inf_loss, *rows, local + len(local)),
    ]  # fmt: skip
    for call in calls:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    results = {name: [v.detach(), *torch.autograd.grad(v, rows)] for name, v in losses.items()}
    results["distill"] = [sum(both).detach(), *torch.autograd.grad(sum(both), rows)]
    on_cpu = {name: [value.cpu() for value in values] for name, values in results.items()}
    return {"bank": bank.memory_bank.bank.cpu(), "messages": messages, **on_cpu}


def failures(rank: int, size: int, device: str) -> dict[str, Any]:
    """Messages of the errors that a rank gets if another rank passes another width, or ends."""
    messages = {}
    for name, width in (("width", 3 + rank), ("after", 3)):
        z = torch.ones(4, width)
        try:
            it.clip_loss(z, z, scale=1.0, group=dist.group.WORLD)
        except ValueError as error:
            messages[name] = str(error)
    try:
        if rank == 1:
            os._exit(3)  # without a message to the other ranks
        z = torch.ones(4, 3)
        it.clip_loss(z, z, scale=1.0, group=dist.group.WORLD, timeout=60)
    except RankError as error:
        messages["died"] = str(error)
    return messages


def rows_of(rank: int) -> Any:
    """The rows that `rank` passes in `groups` and `caught`."""
    return torch.randn(3 + rank, WIDTH, generator=torch.Generator().manual_seed(rank))


class Queued(nn.Module):
    """An encoder of queries and keys, and a queue of the keys of all processes."""

    def __init__(self, size: int, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(WIDTH, 4, dtype=torch.float64)
        self.queue = it.KeyQueue(size, 4, group).double()

    def forward(self, query: Any, key: Any, ids: Any) -> Any:
        return self.encoder(query), *self.queue(self.encoder(key), ids)


def queued_loss(query: Any, keys: Any, ids: Any) -> Any:
    ids = ids[: len(query)], ids
    return it.info_nce_loss(query, keys, ids=ids, scale=2.0, normalize=True)


QUEUE_SIZE = 20  # the first batch leaves room, and the second one fills it


def queue(rank: int, size: int, device: str) -> dict[str, Any]:
    """`KeyQueue` over ranks: [step][keys, ids, gradient of the encoder] under DDP, whose buffers
    are those of rank 0; buffers at the end, and numbers of keys, also after rank 0 read them from a
    checkpoint; errors of a compiled graph's keys and buffers."""
    module = Queued(QUEUE_SIZE, dist.group.WORLD).to(device)
    parallel, steps = DistributedDataParallel(module), []
    for step, batch in enumerate(batches(size)):
        mine = [z.split(SIZES[:size])[rank].to(device) for z in batch]
        ids = torch.arange(SIZES[rank], device=device) + 10 * rank + step
        query, keys, ids = parallel(*mine, ids)
        module.zero_grad()
        queued_loss(query, keys, ids).backward()
        gradient = module.encoder.weight.grad
        steps.append([z.detach().cpu() for z in (keys, ids, gradient)])
    kept = [module.queue.keys.cpu(), module.queue.ids.cpu()]
    eager, graph = (it.KeyQueue(QUEUE_SIZE, 4, dist.group.WORLD).to(device) for _ in range(2))
    run = torch.compile(graph, fullgraph=True, backend="aot_eager")
    for step in range(4):  # equal numbers of rows
        key = torch.randn(3, 4, generator=torch.Generator().manual_seed(9 * step + rank))
        ids = torch.full((3,), rank, device=device)
        for got, want in zip(run(key.to(device), ids), eager(key.to(device), ids), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(graph.keys, eager.keys, rtol=0, atol=0)
    resumed = Queued(QUEUE_SIZE, dist.group.WORLD).to(device)
    if rank == 0:  # reads the checkpoint, which DDP sends to the other ranks
        resumed.load_state_dict(module.state_dict())
    DistributedDataParallel(resumed)
    filled = [one.filled for one in (module.queue, graph, resumed.queue)]
    return {"steps": steps, "kept": kept, "filled": filled}


def groups(rank: int, size: int, device: str) -> dict[str, Any]:
    """(loss, loss of one process) over groups; a rank is in more or fewer of them than others."""
    out: dict[str, Any] = {}

    def call(name: str, group: Any) -> None:
        z = rows_of(rank)
        members = dist.get_process_group_ranks(group)
        every = torch.cat([rows_of(member) for member in members])
        loss = it.clip_loss(z, z.flip(1), scale=2.0, group=group, timeout=100)
        out[name] = loss, it.clip_loss(every, every.flip(1), scale=2.0)

    if rank < 2:  # groups that the other ranks do not know
        group = dist.new_group([0, 1], use_local_synchronization=True)
        for _ in range(1 + rank):
            dist.new_group([rank], use_local_synchronization=True)
        call("first two", group)
    call("world", dist.group.WORLD)
    pairs = {pair: dist.new_group(pair) for pair in [(0, 1), (1, 2), (2, 3), (0, 2), (0, 1, 2)]}
    for pair, group in pairs.items():  # overlapping
        if rank in pair:
            call(f"{pair}", group)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "local"))
    for level in ("nodes", "local"):
        call(level, mesh.get_group(level))
    for time_ in ("once", "again"):  # a group that is destroyed
        group = dist.new_group()
        call(time_, group)
        dist.destroy_process_group(group)
    dist.barrier()  # before a rank destroys the groups of all
    return out


def caught(rank: int, size: int, device: str) -> dict[str, Any]:
    """Messages of ranks, and the longest time, if rank 1 catches its own error and goes on."""
    out: dict[str, Any] = {}
    for exchange in ("ring", "gather"):
        for error in (OSError, KeyboardInterrupt):

            def progress(*_: Any, error: type[BaseException] = error) -> None:
                if rank == 1:
                    raise error("no more of this")

            group, z = dist.new_group(), rows_of(rank)
            options: dict[str, Any] = {"scale": 1.0, "group": group, "exchange": exchange}
            it.clip_loss(z, z, **options)
            began, said = time.monotonic(), []
            for _ in range(2):
                try:
                    it.clip_loss(z, z, **options, progress=progress, timeout=60)
                except BaseException as seen:
                    said.append(f"{type(seen).__name__}: {seen}")
            after = time.monotonic() - began
            dist.barrier()  # over other connections, which still work
            out[f"{exchange} {error.__name__}"] = said, after
    return out


def late(rank: int, size: int, device: str) -> dict[str, Any]:
    """The message and the time of the error of the first call, if another rank does not call."""
    z, group, began = torch.ones(4, 3), dist.new_group(), time.monotonic()
    message = ""
    try:
        if rank != 1:
            it.clip_loss(z, z, scale=1.0, group=group, timeout=2)
    except RankError as error:
        message = str(error)
    after = time.monotonic() - began
    dist.barrier()
    return {"said": message, "after": after}


def main(cases: str, rank: int, size: int, folder: Path, device: str = "cpu") -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store", rank=rank, world_size=size,
    )  # fmt: skip
    for case in cases.split(","):
        if case in ("clip", "siglip"):
            out = train(case, rank, size, size, device)
        else:
            cases_of = {"drop_ins": drop_ins, "failures": failures, "cached": cached, "late": late,
                        "groups": groups, "caught": caught, "queue": queue}  # fmt: skip
            out = cases_of[case](rank, size, device)
        torch.save(out, folder / f"{case}-{rank}.pt")
    if case in ("failures", "caught"):
        os._exit(0)  # the ranks are out of step, so destroy_process_group would hang
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])
