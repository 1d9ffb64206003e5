"""Time a loss and its gradients over this host's GPUs by each exchange, beside other projects.

python benchmarks/ranks/exchanges.py [--loss clip] [--gpus 2] [--batch 8192 16384 32768 65536]
    [--dim 512] [--contenders gather ring torch open_clip inf_cl siglip_kernel]
    [--output benchmarks/results/exchanges.json]
mpiexec -n 2 python benchmarks/ranks/exchanges.py ...

Each GPU has a process of torch.distributed. A step is the loss and `backward()`, of unit rows in
bfloat16. Its time is that of the slowest rank, the median over steps. Started by mpiexec, a rank a
GPU, it also times `infonce.distributed`, loss and all gradients of CuPy arrays by one call over
MPI, and how long its transfers take, hidden behind products or not. All steps then begin after a
barrier of MPI, otherwise after one of torch.distributed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from infonce.distributed.communicators.mpi import connect, load_mpi
from infonce.distributed.transports.gpu import measuring
from torch.distributed.nn.functional import all_gather

import infonce.torch
from infonce import distributed
from infonce.arrays import native
from infonce.cli import machine
from infonce.cli.common import to_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
OVER_MPI = {"gather_mpi": "gather", "ring_mpi": "ring"}
OURS = (*OVER_MPI, "gather", "ring")
CONTENDERS = {
    "clip": (*OURS, "torch", "open_clip", "inf_cl"), "siglip": (*OURS, "siglip_kernel")
}  # fmt: skip
SCALE = 1 / 0.07
BIAS = -10.0  # of siglip
WARM, MOST_WARM = 0.05, 200  # seconds and steps before those that are timed: processors wake up


def make_step(kind: str, name: str, rank: int, size: int, *inputs: Any) -> Callable[[], None]:
    """Loss and gradients of (image, text, scale), by a contender's loss of that kind."""
    if exchange := OVER_MPI.get(name):
        arrays = [native(z.detach()) for z in inputs[:2]] + [BIAS] * (kind == "siglip")
        function = getattr(distributed, f"{kind}_loss_and_grad")
        return partial(function, *arrays, scale=SCALE, exchange=exchange)
    loss = make_loss(kind, name, rank, size)

    def step() -> None:
        loss(*inputs).backward()
        for z in inputs:
            z.grad = None

    return step


def make_loss(kind: str, name: str, rank: int, size: int) -> Callable[[Any, Any, Any], Any]:
    """(image, text, scale) -> loss."""
    if name == "siglip_kernel":
        from siglip_kernel.distributed import DistributedSigLIPLoss

        sigmoid = DistributedSigLIPLoss(rank=rank, world_size=size)
        return lambda image, text, scale: sigmoid(
            image, text, scale, torch.tensor(BIAS, device=image.device)
        )
    if name == "torch":  # the operations of open_clip with local_loss and gather_with_grad

        def eager(image: Any, text: Any, scale: Any) -> Any:
            images, texts = (torch.cat(all_gather(z)) for z in (image, text))
            labels = torch.arange(len(image), device=image.device) + rank * len(image)
            logits = scale * image @ texts.T, scale * text @ images.T
            return sum(torch.nn.functional.cross_entropy(x, labels) for x in logits) / 2

        return eager
    if name == "open_clip":
        from open_clip.loss import ClipLoss

        criterion = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=size)
        return lambda image, text, scale: criterion(image, text, scale)
    if name == "inf_cl":
        from inf_cl import cal_inf_loss

        def both(image: Any, text: Any, scale: Any) -> Any:
            sides = (image, text), (text, image)
            return sum(cal_inf_loss(q, k, scale=scale, head_dim=256) for q, k in sides) / 2

        return both
    bias = [BIAS] * (kind == "siglip")
    function = getattr(infonce.torch, f"{kind}_loss")
    return lambda image, text, scale: function(
        image, text, *bias, scale=scale, group=dist.group.WORLD, exchange=name
    )


def seconds(step: Callable[[], None], steps: int, barrier: Callable[[], Any]) -> list[float]:
    """The time of each step, on the slowest rank."""
    step_seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        barrier()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        step_seconds.append(time.perf_counter() - began)
    slowest = torch.tensor(step_seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(s) for s in slowest.cpu()]


def transfers(
    run: Callable[[], None], steps: int, barrier: Callable[[], Any]
) -> dict[str, float]:  # fmt: skip
    """Seconds of a step that transfers over MPI's ranks are under way on this rank's GPU, and that
    its work waits for them."""
    with measuring(connect(None)) as so_far:
        seconds(run, steps, barrier)
        under_way, waited = so_far()
    return {"transfers_s": under_way / steps, "not_hidden_s": waited / steps}


def work(
    rank: int, arguments: argparse.Namespace, size: int, folder: str,
    barrier: Callable[[], Any] = dist.barrier,
) -> None:  # fmt: skip
    """One rank: times every contender at every size; rank 0 writes what it found."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/store", rank=rank, world_size=size)
    rows = []
    for batch in arguments.batch:
        generator = torch.Generator("cuda").manual_seed(rank)
        shape = len(range(rank, batch, size)), arguments.dim
        image, text = (
            torch.nn.functional.normalize(torch.randn(shape, device="cuda", generator=generator))
            .bfloat16()
            .requires_grad_()
            for _ in range(2)
        )
        scale = torch.tensor(SCALE, device="cuda", requires_grad=True)
        row: dict[str, Any] = {"gpus": size, "batch": batch, "dim": arguments.dim}
        rows.append(row)
        for name in arguments.contenders:
            try:
                run = make_step(arguments.loss, name, rank, size, image, text, scale)
                once = seconds(run, 3, barrier)[-1]
                seconds(run, int(min(MOST_WARM, WARM / once)), barrier)
                times = seconds(run, arguments.steps, barrier)
                row |= {f"{name}_s": statistics.median(times), f"{name}_least_s": min(times)}
                if name in OVER_MPI:
                    counts = transfers(run, arguments.steps, barrier)
                    row |= {f"{name}_{k}": v for k, v in counts.items()}
            except Exception as error:  # of another project: the others are still timed
                if name in OURS:
                    raise
                print(f"{name}, {batch}: {error}", file=sys.stderr)
                continue
            if rank == 0:
                least, median = 1e3 * row[f"{name}_least_s"], 1e3 * row[f"{name}_s"]
                print(
                    f"{size} GPUs, {batch}: {name} {median:.3f} ms, {least:.3f} at least",
                    flush=True,
                )
    if rank == 0:
        Path(folder, "rows.json").write_text(to_json(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[2])
    parser.add_argument("--batch", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20, help="timed, the median counts")
    parser.add_argument("--loss", choices=CONTENDERS, default="clip")
    every = list(dict.fromkeys(name for names in CONTENDERS.values() for name in names))
    parser.add_argument("--contenders", nargs="+", choices=every, help="all that have the loss")
    parser.add_argument("--output", type=Path, default=RESULTS / "exchanges.json")
    arguments = parser.parse_args()
    arguments.contenders = arguments.contenders or CONTENDERS[arguments.loss]
    if lacking := set(arguments.contenders) - set(CONTENDERS[arguments.loss]):
        parser.error(f"--contenders: {', '.join(sorted(lacking))} has no {arguments.loss}")

    rows: list[Any] = []
    try:
        ranks = load_mpi().COMM_WORLD
    except ImportError:
        ranks = None
    if ranks is not None and ranks.size > 1:
        with tempfile.TemporaryDirectory() as folder:
            everyones = ranks.bcast(folder)
            work(ranks.rank, arguments, ranks.size, everyones, ranks.Barrier)
            ranks.barrier()
            if ranks.rank:
                return
            rows = json.loads(Path(folder, "rows.json").read_text())
    else:
        arguments.contenders = [name for name in arguments.contenders if name not in OVER_MPI]
        for size in arguments.gpus:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(work, (arguments, size, folder), size)
                rows += json.loads(Path(folder, "rows.json").read_text())
    report = {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()} of one host",
        "versions": machine.versions("torch", "open_clip_torch", "inf_cl", "siglip-kernel"),
        "commit": machine.commit(),
        "date": machine.now(),
        "settings": {"loss": arguments.loss, "dtype": "bfloat16", "temperature": 0.07,
                     "open_clip": "local_loss, gather_with_grad"},
        "results": rows,
    }  # fmt: skip
    arguments.output.write_text(to_json(report) + "\n")


if __name__ == "__main__":
    main()
