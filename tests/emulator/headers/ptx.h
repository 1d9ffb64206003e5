// What kernels/cuda/ptx.cuh offers, on the host: each function by the same name.
#pragma once
#include "cuda.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
static_assert(sizeof(u64) == sizeof(uint64_t));

inline u32 shared_address(const void* p) { return (u32)((const char*)p - device::current->shared); }

// --- between threads, blocks and GPUs -------------------------------------------------------------------

inline void named_barrier_sync(int barrier, int threads, AT) { device::sync_named(barrier, threads, at); }
inline void named_barrier_arrive(int barrier, int threads, AT) { device::arrive_named(barrier, threads, at); }

inline void add_release(u32* counter, u32 x) { __atomic_fetch_add(counter, x, __ATOMIC_RELEASE); }
inline u32 load_acquire(const u32* counter, AT) {
  device::pause(false, at);
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}
inline void store_release_system(u32* to, u32 number) { __atomic_store_n(to, number, __ATOMIC_RELEASE); }
inline u32 load_acquire_system(const u32* from, AT) {
  device::pause(true, at);
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}

// --- numbers --------------------------------------------------------------------------------------------

inline float exp2_(float x) {  // a subnormal result becomes 0, as by ex2.approx.ftz
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}
inline double exp2_(double x) { return exp2(x); }
inline u32 to_tf32(u32 x) { return (x + 0x1000u) & ~0x1fffu; }
using device::from_bf16;
using device::from_fp16;
using device::to_bf16;
using device::to_fp16;
inline u32 to_bf16x2(float low, float high) { return (u32)to_bf16(low) | (u32)to_bf16(high) << 16; }
inline u32 to_fp16x2(float low, float high) { return (u32)to_fp16(low) | (u32)to_fp16(high) << 16; }
inline float min_or_nan(float x, float y) { return x != x || y != y ? NAN : x < y ? x : y; }
inline void add_up_to(float& sum, float e, float x, float limit) {
  if (!(x > limit)) sum += e;
}
inline float copied(float x) { return x; }
inline void keep(int&, int&) {}

// --- copies from global to shared memory ----------------------------------------------------------------

inline void prefetch_line(const void*) {}
inline void cp_async_16(void* to, const void* from, u32 bytes, AT) {
  device::copy_async(to, from, bytes, 16 - bytes, at);
}
template <class T>
inline void cp_async_number(T* to, const T* from, bool existing, AT) {
  device::copy_async(to, from, existing ? sizeof(T) : 0, existing ? 0 : sizeof(T), at);
}
inline void cp_async_commit() { device::commit_copies(); }
template <int N>
inline void cp_async_wait(AT) { device::wait_for_copies(N, at); }

// --- tensor cores ---------------------------------------------------------------------------------------

inline void ldmatrix_x4(u32 (&r)[4], const void* row, AT) { device::load_matrices(r, row, at); }
inline void stmatrix_x4(void* row, u32 r0, u32 r1, u32 r2, u32 r3, AT) {
  device::store_matrices(row, {r0, r1, r2, r3}, at);
}
template <device::Number NUMBER>
inline void mma(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], u32 b0, u32 b1,
                device::Place at) {
  float* d[4] = {&d0, &d1, &d2, &d3};
  device::multiply(NUMBER, d, a, b0, b1, at);
}
#define MMA(name, number)                                                                            \
  inline void name(float& d0, float& d1, float& d2, float& d3, const u32(&a)[4], u32 b0, u32 b1, AT) { \
    mma<device::Number::number>(d0, d1, d2, d3, a, b0, b1, at);                                      \
  }
MMA(mma_bf16, BF16)
MMA(mma_fp16, FP16)
MMA(mma_tf32, TF32)
#undef MMA

// --- Hopper: mbarriers, TMA, wgmma ----------------------------------------------------------------------

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
using device::TensorMap;

inline uint64_t& mbarrier(u64& barrier) { return (uint64_t&)barrier; }
inline void barrier_init(u64& b, u32 arrivals, AT) { device::init(mbarrier(b), arrivals, at); }
inline void fence_barrier_init(AT) { device::fence_inits(at); }
inline void barrier_wait(u64& b, u32 parity, AT) { device::wait(mbarrier(b), parity, at); }
inline void barrier_arrive(u64& b, AT) { device::arrive(mbarrier(b), 0, at); }
inline void barrier_expect(u64& b, u32 bytes, AT) { device::arrive(mbarrier(b), bytes, at); }
inline void barrier_arrive_at(u64& b, u32 block, AT) { device::arrive_at(mbarrier(b), block, at); }
inline u32 cluster_rank() { return device::current->rank; }
inline void cluster_sync(AT) { device::sync_cluster(at); }

inline void tma_load_multicast(void* to, const TensorMap& map, u64& barrier, int x, int y,
                               unsigned short blocks, AT) {
  device::load_box(to, map, mbarrier(barrier), x, y, blocks, at);
}
inline void tma_load(void* to, const TensorMap& map, u64& barrier, int x, int y, AT) {
  device::load_box(to, map, mbarrier(barrier), x, y, 1u << device::current->rank, at);
}
inline void fence_before_tma_store(AT) { device::fence_stores(at); }
inline void tma_store(const TensorMap& map, const void* from, int x, int y, AT) {
  device::store_box(map, from, x, y, at);
}
inline void tma_stores_wait(AT) { device::wait_for_stores(false, at); }
inline void tma_stores_written(AT) { device::wait_for_stores(true, at); }

template <int N>
inline void warpgroup_reg_alloc() {}
template <int N>
inline void warpgroup_reg_dealloc() {}

inline u32 shared_descriptor(u32 address) { return (address & 0x3ffff) >> 4 | 1 << 16; }
inline u32 transposed_descriptor(u32 address, u32 distance) {
  return (address & 0x3ffff) >> 4 | distance >> 4 << 16;
}
inline void warpgroup_arrive(AT) { device::fence_products(at); }
inline void warpgroup_commit(AT) { device::commit_products(at); }
template <int N>
inline void warpgroup_wait(AT) { device::wait_for_products(N, at); }
template <int N>
inline void fence_accumulators(float (&)[N]) {}

#define WGMMA(type, number)                                                                          \
  inline void wgmma_##type(float (&x)[64], u32 a, u32 b, int add, AT) {                              \
    device::multiply_async({device::Number::number, 128, add != 0, a, b, nullptr, x, nullptr}, at);  \
  }                                                                                                  \
  inline void wgmma_##type(float (&x)[64], float (&y)[64], u32 a, u32 b, int add, AT) {              \
    device::multiply_async({device::Number::number, 256, add != 0, a, b, nullptr, x, y}, at);        \
  }                                                                                                  \
  template <int N>                                                                                   \
  inline void wgmma_tile_##type(float (&x)[N], u32 a, u32 b, int add, AT) {                          \
    device::multiply_async({device::Number::number, 2 * N, add != 0, a, b, nullptr, x, x + 64}, at); \
  }                                                                                                  \
  template <int N>                                                                                   \
  inline void wgmma_rows_##type(float (&x)[N], const u32 (&a)[4], u32 b, AT) {                       \
    device::multiply_async({device::Number::number, 2 * N, true, 0, b, a, x, nullptr}, at);          \
  }
WGMMA(bf16, BF16)
WGMMA(fp16, FP16)
#undef WGMMA
#endif
