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

a, b = np.random.default_rng(0).standard_normal((2, 600, 64))  # products in two threads

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


def test_loops_are_compiled_where_those_of_the_user_are_not() -> None:
    """NUMBA_DISABLE_JIT is for the user's own functions, and stays set for them."""
    program = "import numba\nprint(float(want), type(numba.njit(loss)) is type(loss))"
    (compiled,) = printed(program)
    (disabled,) = printed(program, NUMBA_DISABLE_JIT="1")
    assert (compiled.split()[0], "True") == tuple(disabled.split())


@forks
def test_a_child_computes_whatever_other_threads_do() -> None:
    """A forked child computes although threads of the parent were inside of passes and held
    locks."""
    lines = printed("""
from infonce.kernels.cpu.resources import BLAS, BUFFER_POOL

ends = threading.Event()

def work():
    while not ends.is_set():
        assert loss() == want

threads = [threading.Thread(target=work) for _ in range(3)]

def hold(of):
    while not ends.is_set():
        with of._lock:
            time.sleep(0.005)

threads += [threading.Thread(target=hold, args=(of,)) for of in (BLAS, BUFFER_POOL)]
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
    """A child forked within a pass finishes that pass, with the threads that BLAS had."""
    lines = printed("""
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


def test_a_thread_that_outlives_the_main_thread() -> None:
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


def test_bits_of_the_first_call() -> None:
    """A sum has one order wherever the arrays of a call lie: a process's first call lays them out
    unlike later ones."""
    lines = printed("""
for name in ("lit", "nt_xent", "clip", "siglip"):
    z = (a[:12, :7],) if name == "nt_xent" else (a[:12, :7], b[:12, :7])
    function = getattr(infonce, name + "_loss_and_grad")
    results = [function(*z, scale=2.0, normalize=False) for _ in range(20)]
    print(len({np.asarray(out.loss).tobytes() for out in results}))
""")
    assert lines == ["1"] * 4


COMPILES = """
import io, sys
from infonce.kernels.cpu.loops import compilation
from numba.core import event

names = []

class Listener(event.Listener):
    def on_start(self, of):
        pass

    def on_end(self, of):
        names.append(of.data["dispatcher"].py_func.__qualname__)

class Terminal(io.StringIO):
    def isatty(self):
        return True

event.register("numba:compile", Listener())
sys.stderr = Terminal()
single = [x[:48].astype(np.float32) for x in (a, b)]
for method in ORDER:
    out = infonce.clip_loss_and_grad(*single, scale=0.3, method=method, normalize=False)
    for array in (out.loss, *out.grads, *out.lse):
        print(method, np.asarray(array).tobytes().hex())
z, y = (x[:64, :8].astype(np.float32) for x in (a, b))
ids, ones = np.arange(64) // 2, np.ones(64, np.float32)
for options in ({}, {"ids": ids}, {"groups": ids // 4}, {"key_bias": ones}, {"dims": (4, 8)},
                {"false_negative_margin": 0.1}, {"guide": (y, z)}, {"label_smoothing": 0.1}):
    for method in ("auto", "tiled"):
        for loss in (infonce.clip_loss_and_grad, infonce.lit_loss_and_grad):
            loss(z, y, scale=2.0, normalize=True, method=method, **options)
infonce.siglip_loss_and_grad(z, y, positive_ids=ids, normalize=True)
infonce.siglip_loss_and_grad(z, y, normalize=True)
infonce.sup_con_loss_and_grad(z, ids, scale=2.0, normalize=True)
said = sys.stderr.getvalue()
print(said.count("\\n"), said.count(compilation._Notice.TEXT))
print(sorted({name for name in names if names.count(name) > 1}), len({*names}))
"""


def test_the_process_that_compiles_and_a_later_one(tmp_path: Path) -> None:
    """One signature of a loop serves all options of a dtype, and a loop calls no other compiled
    function. A terminal is told once. A later process loads the machine code, calls it in another
    order, and returns the same bits."""
    first, later = (
        printed(f"ORDER = {order}\n{COMPILES}", NUMBA_CACHE_DIR=str(tmp_path))
        for order in (["auto", "tiled"], ["tiled", "auto"])
    )
    *bits, said, compiled = first
    assert len(bits) == 12
    assert sorted(bits) == sorted(later[:12])
    assert (said, later[12]) == ("1 1", "0 0")
    repeated, _, number = compiled.rpartition(" ")
    assert repeated == "[]"
    assert 10 < int(number) <= 20
    assert later[13] == "[] 0"
