"""The emulator, by small kernels: threads that act together, and mistakes that end a launch."""

import re
from collections.abc import Sequence
from typing import Any

import engine
import numpy as np
import pytest
from engine import KernelError, Memory

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
]
OPTIONS = ("-arch=sm_90a",)
SEEDS = range(4)


def launch(
    body: str, memory: Sequence[Memory] = (), grid: int = 1, block: int = 64, shared: int = 0,
    cooperative: bool = False, seed: int = 0, before: str = "",
) -> None:  # fmt: skip
    """Run `body` as a kernel, with pointers a, b, c to the arrays `memory`, `shared` bytes of
    shared memory in s, and the thread's index in t. `before` is code before the kernel."""
    names = "abc"[: len(memory)]
    source = f"""#line 1 "ptx.cuh"
#line 1 "small.cu"
{before}
extern "C" __global__ void small({", ".join(f"int* {name}" for name in names)}) {{
  extern __shared__ __align__(1024) char s[];
  const int t = threadIdx.x;
#line 1 "body"
{body}
}}
"""
    kernel = engine.Kernel(engine.compile_source(source, OPTIONS), "small")
    pointers = [np.uint64(m.ptr) for m in memory]
    kernel.launch(grid, block, shared, pointers, cooperative=cooperative, seed=seed)


def ints(n: int) -> Memory:
    memory = Memory(4 * n)
    memory.view(np.int32)[:] = 0
    return memory


def read(memory: Memory) -> Any:
    return memory.view(np.int32).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_and_blocks(seed: int) -> None:
    out = ints(2 * 64)
    body = """
      __shared__ int sums[2];
      int x = t + 1;
      for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffff, x, by);
      if (t % 32 == 0) sums[t / 32] = x;
      __syncthreads();
      a[blockIdx.x * 64 + t] = sums[0] + sums[1] + __shfl_up_sync(~0u, t, 1) * 10000
          + 1000000 * __syncthreads_or(t == 40) + 10000000 * __popc(__ballot_sync(~0u, t % 3 == 0));
    """
    launch(body, [out], grid=2, seed=seed)
    above = [0, *range(31), 32, *range(32, 63)]
    votes = [11] * 64  # of 0, 3, .. 30 and of 33, 36, .. 63
    want = [2080 + 10000 * u + 1000000 + 10000000 * v for u, v in zip(above, votes, strict=True)]
    assert read(out) == want * 2


@pytest.mark.parametrize("seed", SEEDS)
def test_half_a_warp(seed: int) -> None:
    """A shuffle waits only for the lanes of its mask."""
    out = ints(32)
    body = """
      if (t < 16) a[t] = __shfl_xor_sync(0xffff, t, 1);
      else a[t] = __shfl_sync(0xffff0000, t, 20);
    """
    launch(body, [out], block=32, seed=seed)
    assert read(out) == [t ^ 1 for t in range(16)] + [20] * 16


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_that_wait_for_each_other(seed: int) -> None:
    out = ints(5)
    body = """
      __shared__ int own;
      own = blockIdx.x;
      __syncthreads();
      if (t == 0) {
        add_release((u32*)a + 4, 1);
        while (load_acquire((u32*)a + 4) < 4) {}
      }
      __syncthreads();
      if (t == 1) a[blockIdx.x] = 10 + own;
    """
    launch(body, [out], grid=4, cooperative=True, seed=seed)
    assert read(out) == [10, 11, 12, 13, 4]


def test_shared_memory_holds_nothing_at_first() -> None:
    out = ints(3)
    body = "__shared__ float f; a[0] = f != f; a[1] = ((float*)s)[5] != ((float*)s)[5]; a[2] = 1;"
    launch(body, [out], block=1, shared=64)
    assert read(out) == [1, 1, 1]


def test_copies_are_late_or_early() -> None:
    """A copy has arrived after the wait for it. Before, it has arrived in some schedules."""
    body = """
      int* x = (int*)s;
      x[t] = -1;
      cp_async_number(x + t, a + t, true);
      cp_async_commit();
      b[t] = x[t];
      cp_async_wait<0>();
      c[t] = x[t];
    """
    early = set()
    for seed in SEEDS:
        source, before, after = ints(64), ints(64), ints(64)
        source.view(np.int32)[:] = np.arange(64)
        launch(body, [source, before, after], shared=256, seed=seed)
        assert read(after) == list(range(64))
        early |= {x == t for t, x in enumerate(read(before))}
    assert early == {True, False}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("x", "y"), [(64, 0), (-3, -1)])
def test_boxes_arrive_whole(x: int, y: int, seed: int) -> None:
    """TMA copies a box of 4 rows from row y and column x on, of a matrix of 3 rows and 72 columns:
    numbers of the box that are outside of the matrix become 0."""
    matrix, out = Memory(3 * 144), Memory(512)
    matrix.view(np.uint16)[:] = np.arange(3 * 72)
    body = """
      u64& ready = *(u64*)(s + 512);
      if (t == 0) { barrier_init(ready, 1); fence_barrier_init(); }
      __syncthreads();
      if (t == 0) { barrier_expect(ready, 512); tma_load(s, *(const TensorMap*)b, ready, XY); }
      barrier_wait(ready, 0);
      for (int i = t; i < 128; i += 32) a[i] = ((int*)s)[i];
    """.replace("XY", f"{x}, {y}")
    map_ = Memory(128, 128)
    map_.view()[:] = np.frombuffer(engine.tensor_map(matrix.ptr, 3, 144, 144, 4), np.uint8)
    launch(body, [out, map_], block=32, shared=1024, seed=seed)
    got = out.view(np.uint16).reshape(4, 8, 8)  # chunks of 16 bytes, swizzled by the row
    padded = np.pad(matrix.view(np.uint16).reshape(3, 72), 64)
    box = padded[64 + y : 68 + y, 64 + x : 128 + x].reshape(4, 8, 8)
    for row in range(4):
        for chunk in range(8):
            assert got[row, chunk ^ row].tolist() == box[row, chunk].tolist()


@pytest.mark.parametrize("element", [16, -1])
@pytest.mark.parametrize("access", ["b[0] = a[{}];", "a[{}] = 1;"])
def test_one_element_beyond_an_array(access: str, element: int) -> None:
    a, b = ints(16), ints(16)
    if element < 0:  # an array of whole pages, so that a page that cannot be used is before it too
        a = ints(1024)
    where = "4 bytes before" if element < 0 else "0 bytes beyond the end of"
    message = f"^small: an access {where} array of .*\n  block 0, thread 3"
    with pytest.raises(KernelError, match=message):
        launch("if (t == 3) {" + access.format(element) + "}", [a, b])
    launch("a[t % 16] = t;", [a, b])  # the process lives, and can launch


def test_the_line_of_a_fault() -> None:
    with pytest.raises(KernelError, match=r"after body:2.*, at body:4"):
        launch("\n__syncthreads();\n\na[0] = a[64 + t];", [ints(64)])


BARRIER = "u64& ready = *(u64*)s; "
ONE = 0, 1, 64
# Message -> (kernel, length of the array a, threads, bytes of shared memory)
FAULTS = {
    "a thread has written .* array of 20 bytes": ("a[5] = 1;", 5, 64, 0),
    r"index 8 of an array of type 'int \[8\]'": ("__shared__ int x[8]; x[t] = t;", 0, 64, 0),
    "0 bytes beyond the end of shared memory of 1024 bytes": ("s[1024] = 1;", 0, 64, 1024),
    "written just before or beyond its shared memory": ("s[1000] = 1;", 0, 64, 1000),
    "an access to '.*float4' .* a multiple of 16 bytes": (
        "*(float4*)(a + 1) = make_float4(0, 0, 0, 0);", 16, 64, 0,
    ),
    r"come together here and at body:\d": (
        "if (t == 3)\n __syncwarp();\n else\n __shfl_sync(~0u, t, 0);", 0, 32, 0,
    ),
    "a shuffle from lane 9, which is not in the mask": (
        "if (t < 8) __shfl_sync(0xff, t, 9);", 0, 32, 0,
    ),
    "no warpgroup_arrive": (
        "float x[64]; wgmma_bf16(x, shared_descriptor(0), shared_descriptor(0), 0);", 0, 128, 2**15,
    ),
    "no mbarrier has been initialised": (BARRIER + "barrier_arrive(ready);", *ONE),
    "more than 2 arrivals": (
        BARRIER + "barrier_init(ready, 2); barrier_expect(ready, 16); barrier_arrive(ready);"
        "barrier_arrive(ready);", *ONE,
    ),
    "overwritten": (BARRIER + "barrier_init(ready, 2); s[3] = 1; barrier_arrive(ready);", *ONE),
    "an mbarrier at body:.* parity 0, 16 bytes to come.*, 1 of 1 arrived: thread 0": (
        BARRIER + "barrier_init(ready, 1); barrier_expect(ready, 16); barrier_wait(ready, 0);",
        *ONE,
    ),
    "an mbarrier at body:.* phase 1, waits for parity 1": (
        BARRIER + "barrier_init(ready, 1); barrier_arrive(ready); barrier_wait(ready, 0);"
        "barrier_wait(ready, 1);", *ONE,
    ),
    "block 1 of a cluster of 1": (
        BARRIER + "barrier_init(ready, 1); barrier_arrive_at(ready, 1);", *ONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message: str) -> None:
    body, length, block, shared = FAULTS[message]
    with pytest.raises(KernelError, match=rf"^small: (.*\n)*.*{message}"):
        launch(body, [ints(length)] * (length > 0), block=block, shared=shared)


def test_a_stack_that_is_too_small() -> None:
    deep = """
      int deep(int n) {
        volatile char x[1000];
        x[n % 7] = 1;
        return n ? deep(n - 1) + x[3] : 0;
      }
    """
    with pytest.raises(KernelError, match=r"^small: an access beyond the end of its stack"):
        launch("a[0] = deep(1000);", [ints(1)], block=1, before=deep)


def test_barriers_that_never_complete() -> None:
    body = """if (t != 5 && t < 60)
      named_barrier_sync(3, 64);
    else while (!*(volatile int*)a)
      load_acquire((u32*)a);"""
    with pytest.raises(KernelError) as error:
        launch(body, [ints(1)])
    assert str(error.value).splitlines() == [
        "small: threads wait for ever",
        "  block 0, threads 0-4, 6-59: a named barrier at body:2, 59 of 64 arrived: "
        "threads 0-4, 6-59",
        "  block 0, threads 5, 60-63: can go on from body:4",
    ]


# Name -> (synchronisation between a write of x[t] and another lane's read, whether it orders them)
ORDERS = {
    "nothing": ("", False),
    "a shuffle": ("__shfl_sync(~0u, t, 0);", False),
    "a vote": ("__all_sync(~0u, 1);", False),
    "half of the warp": ("if (t % 32 < 16) __syncwarp(0xffff);", False),
    "the warp": ("__syncwarp();", True),
    "the block": ("__syncthreads();", True),
    "a named barrier": ("named_barrier_sync(1, 64);", True),
    "an mbarrier": ("barrier_arrive(ready); barrier_wait(ready, 0);", True),
}


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_the_accesses_of_a_warp(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WATCHES_ORDER", True)
    synchronisation, is_ordered = ORDERS[order]
    body = f"""{BARRIER} __shared__ short x[64];
      if (t == 0) barrier_init(ready, 64);
      __syncthreads();
      x[t] = t;
      {synchronisation}
      a[t] = x[t ^ 1];
      atomicAdd(a + 64, 1);"""
    out = ints(65)
    if is_ordered:
        for seed in SEEDS:
            launch(body, [out], shared=64, seed=seed)
        assert read(out) == [t ^ 1 for t in range(64)] + [64 * len(SEEDS)]
        return
    message = (
        r"^small: a (read of|write to) byte \d+ of static shared(.*\n)*.*"
        r"has no order with the (read|write) by lane \d+ of this warp"
    )
    with pytest.raises(KernelError, match=message):
        launch(body, [out], shared=64, seed=1)


def test_a_write_after_a_read_has_to_be_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WATCHES_ORDER", True)
    no_order = r"a write to byte \d+ of array of 256 bytes has no order"
    with pytest.raises(KernelError, match=no_order):
        launch("b[t] = a[t ^ 1]; __shfl_sync(~0u, t, 0); a[t] = t;", [ints(64), ints(64)])


TMA = """
  const TensorMap& map = *(const TensorMap*)a;
  u64& ready = *(u64*)(s + 4096);
  if (t == 0) { barrier_init(ready, 1); fence_barrier_init(); }
  __syncwarp();
"""
TMA_FAULTS = {
    "block 0 ends while this copy to it":
        "if (t == 0) { barrier_expect(ready, 128); tma_load(s, map, ready, 0, 0); }",
    "without a fence after its init":
        "if (t == 0) { barrier_init(ready, 1); barrier_expect(ready, 128);"
        "tma_load(s, map, ready, 0, 0); barrier_wait(ready, 0); }",
    "a multiple of 128": "if (t == 0) tma_load(s + 16, map, ready, 0, 0);",
    "lanes 0xfffffffe have written without":
        "stmatrix_x4(s + t * 16, 1, 2, 3, 4); if (t == 0) { fence_before_tma_store();"
        "tma_store(map, s, 0, 0); tma_stores_written(); }",
    "before this store has read": "if (t == 0) tma_store(map, s, 0, 0);",
}  # fmt: skip


@pytest.mark.parametrize("message", TMA_FAULTS)
def test_tma(message: str) -> None:
    matrix, map_ = Memory(128), Memory(128, 128)
    map_.view()[:] = np.frombuffer(engine.tensor_map(matrix.ptr, 1, 128, 128, 1), np.uint8)

    def in_some_schedule() -> None:
        for seed in range(1, 20):
            launch(TMA + TMA_FAULTS[message], [map_], block=32, shared=8192, seed=seed)

    with pytest.raises(KernelError, match=message):
        in_some_schedule()


def test_errors_of_the_compiler_name_file_and_line() -> None:
    with pytest.raises(engine.CompileError, match=re.escape("body(2)")):
        launch("\nmissing();")
