"""Threads, forks and ends of processes. Each program runs by itself, with two threads for BLAS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import os, threading, time
import numpy as np
from threadpoolctl import threadpool_info

numpys = [of["filepath"] for of in threadpool_info() if of["user_api"] == "blas"]

import infonce
from infonce.kernels.cpu import schedule

schedule.MIN_THREADED_CALL = 0
a, b = np.random.default_rng(0).standard_normal((2, 600, 16))

def loss(**options):
    return infonce.clip_loss(a, b, scale=0.3, method="tiled", normalize=False, **options)

def blas():
    return [of["num_threads"] for of in threadpool_info() if of["filepath"] in numpys]

want, before = loss(), blas()
"""
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def printed(program: str, **variables: str) -> list[str]:
    """The lines that it prints, if it ends by itself and without an error."""
    environment = {**os.environ, "INFONCE_NUM_THREADS": "2", **variables}
    environment |= {f"{library}_NUM_THREADS": "2" for library in ("OPENBLAS", "OMP", "MKL")}
    done = subprocess.run(
        [sys.executable, "-c", START + program],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    assert done.returncode == 0
    return done.stdout.split("\n")[:-1]


def test_blas_has_one_thread_in_passes_of_any_thread() -> None:
    """BLAS has one thread until the last of two overlapping passes ends; then the caller's
    number."""
    lines = printed("""
from infonce.kernels.cpu import worker

seen, stays = set(), threading.Semaphore(0)
inside, go_on = threading.Event(), threading.Event()
tile_products = worker.Worker.tile_products

def look(*of):
    seen.update(blas())
    if stays.acquire(blocking=False):
        inside.set()
        go_on.wait(30)
        seen.update(blas())
    return tile_products(*of)

def start():
    thread = threading.Thread(target=loss)
    thread.start()
    return thread

worker.Worker.tile_products = look
start().join()
loss()
print(seen, blas() == before)
stays.release()
thread = start()
inside.wait(30)
loss()
go_on.set()
thread.join()
print(seen, blas() == before)
""")
    assert lines == ["{1} True", "{1} True"]


@forks
def test_a_child_computes_whatever_other_threads_do() -> None:
    """A forked child computes although threads of the parent were inside of passes and held
    locks."""
    lines = printed("""
from infonce.kernels.cpu.one_block.team import HELPERS
from infonce.kernels.cpu.resources import BLAS, BUFFER_POOL, POOLS

ends = threading.Event()

def work():
    while not ends.is_set():
        assert loss() == want

threads = [threading.Thread(target=work) for _ in range(3)]

def hold(of):
    while not ends.is_set():
        with of._lock:
            time.sleep(0.005)

threads += [threading.Thread(target=hold, args=(of,)) for of in (BLAS, BUFFER_POOL, HELPERS, POOLS)]
for thread in threads:
    thread.start()
for _ in range(10):
    child = os.fork()
    if not child:
        right = blas() == before and loss() == want and blas() == before
        os._exit(0 if right else 1)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    print("right" if ended and status == 0 else "wrong")
ends.set()
for thread in threads:
    thread.join()
print(blas() == before)
""")
    assert lines == ["right"] * 10 + ["True"]


@forks
def test_a_child_of_a_pass() -> None:
    """A child forked within a pass finishes that pass, and BLAS has its threads again."""
    lines = printed("""
os.environ["INFONCE_NUM_THREADS"] = "1"
children = []

def fork(*_):
    if not children:
        children.append(os.fork())

right = loss(progress=fork) == want and blas() == before
if not children[0]:
    os._exit(0 if right else 1)
print(right, os.waitpid(children[0], 0)[1])
""")
    assert lines == ["True 0"]


def test_worker_threads_end_with_the_process() -> None:
    """Worker threads do not keep a process alive. A thread that outlives the main thread computes
    right."""
    assert printed("print(loss() == want)") == ["True"]
    lines = printed("""
def work():
    for _ in range(5):
        right = loss() == want
    while threading.main_thread().is_alive():
        right = right and loss() == want
    time.sleep(0.2)
    for _ in range(3):
        right = right and loss() == want
    print(right, blas() == before)

threading.Thread(target=work).start()
""")
    assert lines == ["True True"]


@pytest.mark.slow  # compiles anew
def test_bits_of_the_process_that_compiles(tmp_path: Path) -> None:
    """Later processes load the machine code, call it in another order, and return the same bits."""
    first, later = (
        printed(
            f"""
for method in {methods}:
    out = infonce.clip_loss_and_grad(a[:48], b[:48], scale=0.3, method=method, normalize=False)
    for array in (out.loss, *out.grads, *out.lse):
        print(method, np.asarray(array).tobytes().hex())
""",
            NUMBA_CACHE_DIR=str(tmp_path),
        )
        for methods in (["auto", "tiled"], ["tiled", "auto"])
    )
    assert len(first) == 12
    assert sorted(first) == sorted(later)
