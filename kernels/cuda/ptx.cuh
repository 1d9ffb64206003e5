// Instructions that CUDA C++ does not spell, one function each.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// --- between threads --------------------------------------------------------------------------------

// A named barrier for some of a block's warps, `threads` in all. Barrier 0 is __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrive at a named barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- between blocks ---------------------------------------------------------------------------------

// Adds to a counter. Who reads the new value by load_acquire sees all that this block wrote before.
__device__ __forceinline__ void add_release(u32* counter, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}
// Reads a counter. What other blocks wrote before their add_release is seen from here on.
__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

// --- between GPUs -----------------------------------------------------------------------------------

// Who reads the number by load_acquire_system, on any GPU, sees all that this thread wrote before.
__device__ __forceinline__ void store_release_system(u32* at, u32 number) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(number) : "memory");
}
__device__ __forceinline__ u32 load_acquire_system(const u32* at) {
  u32 number;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(number) : "l"(at) : "memory");
  return number;
}

// --- arithmetic -------------------------------------------------------------------------------------

// 2^x, relative error 2^-22; 2^-inf = 0, NaN stays.
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_(double x) { return exp2(x); }

// Rounded to nearest: the tensor cores would cut the low bits off instead, a bias.
__device__ __forceinline__ u32 to_tf32(u32 x) {
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
  return y;
#else
  return (x + 0x1000u) & ~0x1fffu;
#endif
}

// bfloat16 is the upper half of a float.
__device__ __forceinline__ float from_bf16(unsigned short x) {
  return __uint_as_float((u32)x << 16);
}
__device__ __forceinline__ unsigned short to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);  // to nearest, ties even
}
__device__ __forceinline__ float from_fp16(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ unsigned short to_fp16(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
// Two at once; `low` is the first in memory.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return (u32)to_bf16(low) | (u32)to_bf16(high) << 16;
#endif
}
__device__ __forceinline__ u32 to_fp16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#else
  return (u32)to_fp16(low) | (u32)to_fp16(high) << 16;
#endif
}

// --- copies from global to shared memory -------------------------------------------------------------

// 16 bytes, of which the last 16 - bytes are zeros; asynchronous where the chip can.
__device__ __forceinline__ void cp_async_16(void* to, const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#else
  *(uint4*)to = bytes ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#endif
}
// One number of 4 or 8 bytes, or zero.
template <class T>
__device__ __forceinline__ void cp_async_number(T* to, const T* from, bool existing) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
               ::"r"(shared_address(to)), "l"(from), "n"(sizeof(T)), "r"(existing ? (u32)sizeof(T) : 0)
               : "memory");
#else
  *to = existing ? *from : 0;
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the last N groups of this thread's copies have arrived.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// --- tensor cores ------------------------------------------------------------------------------------

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8 and receives, of
// each, the four bytes at row l / 4, column l % 4.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row))
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// Four 8 x 16-byte matrices the other way: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(void* row, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(row)), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
#endif

#define MMA(name, shape)                                                                      \
  __device__ __forceinline__ void name(float& d0, float& d1, float& d2, float& d3,            \
                                       const u32 (&a)[4], u32 b0, u32 b1) {                   \
    asm("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "           \
        "{%0, %1, %2, %3};"                                                                   \
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                      \
  }
#if __CUDA_ARCH__ >= 800
MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA(mma_fp16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#endif
#undef MMA

// --- Hopper: mbarriers, TMA, wgmma ------------------------------------------------------------------
//
// These exist on compute capability 9.0 alone. A barrier counts arrivals and bytes; a waiter names
// the parity of the phase that it waits for. Copies and products are asynchronous.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct __align__(128) TensorMap {  // how a matrix lies in memory, written by the driver
  unsigned char opaque[128];
};

__device__ __forceinline__ void barrier_init(u64& barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
// The writes of barrier_init come before any use of the mbarriers by TMA or other blocks of the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_wait(u64& barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=;\n}" ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               ::"r"(shared_address(&barrier)) : "memory");
}
// Arrive, and have the phase wait for so many bytes of copies too.
__device__ __forceinline__ void barrier_expect(u64& barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}
// Arrive at the same barrier of another block of the cluster. (With .release.cluster this would
// become a memory barrier over the whole GPU, at half the speed; products only read.)
__device__ __forceinline__ void barrier_arrive_at(u64& barrier, u32 block) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
               ::"r"(shared_address(&barrier)), "r"(block) : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of the cluster; those of a warp need not come together.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

// Start loading a TMA box of a matrix, from column x and row y on. Elements outside the matrix are
// zeros.
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, u64& barrier, int x,
                                         int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)), "l"(&map), "r"(x), "r"(y),
      "r"(shared_address(&barrier)) : "memory");
}
// The same into several blocks of the cluster, one a bit of `blocks`.
__device__ __forceinline__ void tma_load_multicast(void* to, const TensorMap& map, u64& barrier, int x,
                                            int y, unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)), "l"(&map),
      "r"(x), "r"(y), "r"(shared_address(&barrier)), "h"(blocks) : "memory");
}

// What this thread has written to shared memory comes before the reads of TMA stores started later.
__device__ __forceinline__ void fence_before_tma_store() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Start a TMA store of a box to a matrix. Elements outside the matrix are not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, const void* from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
               "cp.async.bulk.commit_group;"
               ::"l"(&map), "r"(x), "r"(y), "r"(shared_address(from)) : "memory");
}
// TMA has read the shared memory of all stores that this thread started: it may be overwritten.
__device__ __forceinline__ void tma_stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// All stores that this thread started are complete.
__device__ __forceinline__ void tma_stores_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Raise or lower the number of registers of each thread of this warpgroup (setmaxnreg).
template <int N>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Lower half of wgmma's shared memory descriptor of rows of 128 bytes, as a TMA box with 128-byte
// swizzle leaves them: groups of eight rows are 1024 bytes apart. Adding 1 moves on by 16 bytes along
// the rows.
__device__ __forceinline__ u32 shared_descriptor(u32 address) {
  return (address & 0x3ffff) >> 4 | 1 << 16;
}
// Upper half: 128-byte swizzle, 1024 bytes between groups of eight rows
#define DESCRIPTOR_HIGH "0x40000040"
// The same memory read as a transposed operand. Boxes of 64 columns are `distance` bytes from each
// other. Adding 128 moves on by 16 rows.
__device__ __forceinline__ u32 transposed_descriptor(u32 address, u32 distance) {
  return (address & 0x3ffff) >> 4 | distance >> 4 << 16;
}
// wgmma.fence: registers and shared memory are ready for the products that follow.
__device__ __forceinline__ void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All but the last N committed groups of products are done.
template <int N>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// A fence for the compiler, which does not know when wgmma writes the accumulators: it must not move
// their use before this point.
template <int N>
__device__ __forceinline__ void fence_accumulators(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// x (+)= a b' for 64 rows of a and 128 rows of b, 32 bytes of each; `add` 0: x = a b'.
// Lane 4 g + t of warp w holds, for each eight columns j, x[4 j + e]: row 16 w + g + 8 (e / 2),
// column 8 j + 2 t + e % 2.
#define F8(x, i)                                                                                 \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]),      \
      "+f"(x[i + 6]), "+f"(x[i + 7])
#define F64(x) \
  F8(x, 0), F8(x, 8), F8(x, 16), F8(x, 24), F8(x, 32), F8(x, 40), F8(x, 48), F8(x, 56)
#define REGISTERS_64                                                                             \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
  "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,"    \
  "%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_64_TO_127                                                                      \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,"    \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,"    \
  "%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,"      \
  "%126,%127"
#define WGMMA(name, type)                                                                        \
  __device__ __forceinline__ void name(float (&x)[64], u32 a, u32 b, int add) {                  \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %66, 0;\n"                        \
        "mov.b64 a, {%64, " DESCRIPTOR_HIGH "};\nmov.b64 b, {%65, " DESCRIPTOR_HIGH "};\n"       \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" REGISTERS_64 "},"      \
        " a, b, add, 1, 1, 0, 0;\n}"                                                             \
        : F64(x) : "r"(a), "r"(b), "r"(add));                                                    \
  }                                                                                              \
  /* The same for 256 rows of b: x for the first 128, y for the others. */                       \
  __device__ __forceinline__ void name(float (&x)[64], float (&y)[64], u32 a, u32 b, int add) {  \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %130, 0;\n"                       \
        "mov.b64 a, {%128, " DESCRIPTOR_HIGH "};\nmov.b64 b, {%129, " DESCRIPTOR_HIGH "};\n"     \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                             \
        " {" REGISTERS_64 "," REGISTERS_64_TO_127 "}, a, b, add, 1, 1, 0, 0;\n}"                 \
        : F64(x), F64(y) : "r"(a), "r"(b), "r"(add));                                            \
  }
WGMMA(wgmma_bf16, "bf16")
WGMMA(wgmma_fp16, "f16")
#undef WGMMA
#undef REGISTERS_64_TO_127

// x += a b for 64 rows of a, 16 columns of them in registers as two m64 x 8 products leave them, and
// 16 rows of b, whose further 64 columns are found by `transposed_descriptor`.
#define WGMMA_ROWS(name, type)                                                                   \
  __device__ __forceinline__ void name(float (&x)[64], const u32 (&a)[4], u32 b) {               \
    asm volatile(                                                                                \
        "{\n.reg .b64 b;\nmov.b64 b, {%68, " DESCRIPTOR_HIGH "};\n"                                  \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                             \
        " {" REGISTERS_64 "},"                                                                    \
        " {%64,%65,%66,%67}, b, 1, 1, 1, 1;\n}"                                                  \
        : F64(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                   \
  }                                                                                              \
  __device__ __forceinline__ void name(float (&x)[32], const u32 (&a)[4], u32 b) {               \
    asm volatile(                                                                                \
        "{\n.reg .b64 b;\nmov.b64 b, {%36, " DESCRIPTOR_HIGH "};\n"                                  \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                              \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"   \
        "%23,%24,%25,%26,%27,%28,%29,%30,%31},"                                                  \
        " {%32,%33,%34,%35}, b, 1, 1, 1, 1;\n}"                                                  \
        : F8(x, 0), F8(x, 8), F8(x, 16), F8(x, 24)                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                   \
  }
WGMMA_ROWS(wgmma_rows_bf16, "bf16")
WGMMA_ROWS(wgmma_rows_fp16, "f16")
#undef WGMMA_ROWS
#undef REGISTERS_64
#undef F64
#undef F8

#endif
