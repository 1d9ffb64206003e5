"""Processes that start once and compute many problems: ranks over MPI, also on emulated GPUs, ranks
over gloo, devices of JAX.

`Processes.run` sends a problem to the first process, which collects the answers of the others, and
returns one result of the whole batch. The program: `python processes.py KIND ADDRESS [RANK SIZE]`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 60.0  # seconds for a start, and for a problem
running: dict[str, Processes] = {}


class Processes:
    """Processes of one kind: "mpi 3", "emulated 2", "gloo 3" or "devices 2"."""

    def __init__(self, kind: str) -> None:
        name, size = kind.split()
        self.folder = tempfile.mkdtemp()
        address = str(Path(self.folder) / "socket")
        listener = Listener(address)
        program = [sys.executable, str(Path(__file__)), name, address]
        places = ("support", "matrix", "distributed", "emulator")
        folders = [str(HERE.parent / place) for place in places]
        paths = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {
            "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "INFONCE_NUM_THREADS": "1",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={size}", "JAX_PLATFORMS": "cpu",
        }  # fmt: skip
        if name == "emulated":
            environment["INFONCE_COPY_ENGINES"] = "0"
        mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
        over_mpi = [[mpiexec or "mpiexec", "-n", size, *program]]
        commands = {
            "mpi": over_mpi,
            "emulated": over_mpi,
            "gloo": [[*program, str(rank), size] for rank in range(int(size))],
            "devices": [program],
        }
        self.started = [
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
            for command in commands[name]
        ]
        self.connection: Connection = listener.accept()
        atexit.register(self.stop)

    def run(self, *task: Any) -> Any:
        """What the processes return for a task, or their error."""
        self.connection.send(task)
        if not self.connection.poll(LIMIT):
            for process in self.started:
                process.kill()
            self.started.clear()
            raise TimeoutError(f"no answer in {LIMIT} s to {task}")
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        if self.started:
            self.connection.send(None)
        for process in self.started:
            process.wait(LIMIT)
        shutil.rmtree(self.folder, ignore_errors=True)


def run(kind: str, *task: Any) -> Any:
    """A task by processes of this kind, which are started if none are running."""
    if kind not in running:
        running[kind] = Processes(kind)
    return running[kind].run(*task)


def serve(
    connection: Connection | None, share: Callable[[Any], Any], compute: Callable[..., Any]
) -> None:
    """Computes tasks until the end. `share`: the task of the first process, on all processes."""

    def receive() -> Any:
        try:
            return connection.recv() if connection else None
        except EOFError:  # the test's process has ended without a word
            return None

    while (task := share(receive())) is not None:
        try:
            answer = compute(*task)
        except Exception as error:
            # a copy that can be sent
            kind = type(error) if type(error) in (ValueError, TypeError) else RuntimeError
            text = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
            answer = kind(text)
        if connection:
            connection.send(answer)


def in_schedule(compute: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """The same function, in a schedule of an emulated GPU that follows from the problem's number. A
    thread does the late work of streams, as other ranks may wait for it before this one does."""
    import engine
    from cupy.cuda import stream

    def do_late_work() -> None:
        while True:
            time.sleep(0.01)
            stream.synchronize_all()

    def compute_in_schedule(seed: int, number: int, *others: Any) -> Any:
        stream.chance.seed(8 * number + rank)
        with engine.schedule(number % 3):
            return compute(seed, number, *others)

    threading.Thread(target=do_late_work, daemon=True).start()
    return compute_in_schedule


def main() -> None:
    kind, address, *place = sys.argv[1:]
    if kind == "emulated":
        import emulation

        emulation.begin()  # before CuPy is imported
    if kind in ("mpi", "emulated"):
        import rank_executors
        from mpi4py import MPI

        world, compute = MPI.COMM_WORLD, rank_executors.over_mpi
        if kind == "emulated":
            compute = in_schedule(compute, world.rank)

        def broadcast(task: Any) -> Any:
            arrived = world.Ibarrier()  # MPI waits busily, for hours between tests
            while not arrived.Test():
                time.sleep(0.002)
            return world.bcast(task)

        connection = None if world.rank else Client(address)
        serve(connection, broadcast, compute)
    elif kind == "gloo":
        import rank_executors
        import torch.distributed as dist

        rank, size = map(int, place)
        store = dist.FileStore(str(Path(address).with_name("store")), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

        def share(task: Any) -> Any:
            held = [task]
            dist.broadcast_object_list(held)
            return held[0]

        serve(None if rank else Client(address), share, rank_executors.over_gloo)
        dist.destroy_process_group()
    else:
        import jax_executors

        serve(Client(address), lambda task: task, jax_executors.over_devices)


if __name__ == "__main__":
    main()
