// The words of CUDA C++ that the kernels use, for a host's compiler.
#pragma once
// Without the special functions of C++17, which would take a fifth of the time that a kernel is compiled
#if __has_include(<bits/c++config.h>)
#include <bits/c++config.h>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#endif
#include <math.h>

#include "device.h"
#include "numbers.h"

// Kernels compiled with -fsanitize=thread have the order of their accesses watched, but for atomic ones.
#ifdef __SANITIZE_THREAD__
#define WATCHES_ORDER true
#define NOT_WATCHED __attribute__((no_sanitize_thread, noinline))
#else
#define WATCHES_ORDER false
#define NOT_WATCHED
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __align__(n) alignas(n)
// All in one section: blocks that run side by side each have a copy of it. (The kernels are compiled in an
// unnamed namespace, where a function's static variables stay in the section that is asked for.)
#define __shared__ static __attribute__((section("shared_memory")))

#define threadIdx (device::current->thread)
#define blockIdx (device::current->block)
#define gridDim (device::grid)
#define blockDim (device::block_size)

// --- vectors --------------------------------------------------------------------------------------------

struct alignas(16) double2 { double x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- numbers --------------------------------------------------------------------------------------------

inline double __longlong_as_double(long long x) { return device::bits_as<double>(x); }
inline unsigned __float_as_uint(float x) { return device::bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return device::bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return device::bits_as<float>(x); }
inline float __int_as_float(int x) { return device::bits_as<float>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

// The type of both operands together, as the operators of C have it
template <class T, class U>
using Common = decltype(true ? T() : U());
template <class T, class U>
inline Common<T, U> min(T a, U b) { return (Common<T, U>)a < (Common<T, U>)b ? a : b; }
template <class T, class U>
inline Common<T, U> max(T a, U b) { return (Common<T, U>)a > (Common<T, U>)b ? a : b; }

// --- between threads ------------------------------------------------------------------------------------

#define AT device::Place at = device::here()

inline void __syncthreads(AT) { device::sync_block(0, at); }
inline int __syncthreads_or(int vote, AT) { return device::sync_block(vote, at); }
inline void __syncwarp(unsigned mask = ~0u, AT) { device::together(mask, nullptr, nullptr, at); }
inline void __threadfence() {}
inline void __threadfence_system() { __sync_synchronize(); }
inline void __nanosleep(unsigned, AT) { device::pause(true, at); }

template <class T>
inline T shuffle_(unsigned mask, T x, int from, device::Place at) {
  return device::low_bits_as<T>(device::shuffle(mask, device::bits_as<uint64_t>(x), from, at));
}
template <class T>
inline T __shfl_sync(unsigned mask, T x, int from, AT) { return shuffle_(mask, x, from & 31, at); }
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int by, AT) {
  return shuffle_(mask, x, device::current->lane() ^ by, at);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, int by, AT) {
  const int lane = device::current->lane();
  return shuffle_(mask, x, lane < by ? lane : lane - by, at);
}
inline unsigned __ballot_sync(unsigned mask, int vote, AT) { return device::ballot(mask, vote != 0, at); }
inline int __all_sync(unsigned mask, int vote, AT) { return device::ballot(mask, vote != 0, at) == mask; }
inline int __any_sync(unsigned mask, int vote, AT) { return device::ballot(mask, vote != 0, at) != 0; }

// One thread runs at a time, until it comes to a synchronisation: plain reads and writes are atomic.
template <class T, class U>
NOT_WATCHED inline T atomicAdd(T* p, U x) { const T old = *p; *p = old + (T)x; return old; }
template <class T, class U>
NOT_WATCHED inline T atomicMax(T* p, U x) { const T old = *p; if ((T)x > old) *p = (T)x; return old; }
template <class T, class U>
NOT_WATCHED inline T atomicCAS(T* p, T from, U to) { const T old = *p; if (old == from) *p = (T)to; return old; }
template <class T>
inline T __ldg(const T* p) { return *p; }
template <class T>
inline T __ldcg(const T* p) { return *(const volatile T*)p; }
template <>
inline uint4 __ldcg(const uint4* p) { return *p; }
template <>
inline uint2 __ldcg(const uint2* p) { return *p; }

// --- launches -------------------------------------------------------------------------------------------

namespace device {

template <class P>
inline P parameter(const void* bytes) {
  alignas(P) char copy[sizeof(P)];
  memcpy(copy, bytes, sizeof(P));
  return *(P*)copy;
}
template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct IndicesTo : IndicesTo<N - 1, N - 1, I...> {};
template <size_t... I>
struct IndicesTo<0, I...> : Indices<I...> {};

// A kernel and where the bytes of its parameters are
template <class... P>
struct Call {
  void (*kernel)(P...);
  void* const* parameters;
  template <size_t... I>
  void run(Indices<I...>) const { kernel(parameter<P>(parameters[I])...); }
  static void body(const void* call) { ((const Call*)call)->run(IndicesTo<sizeof...(P)>()); }
};
template <class... P>
inline int launch(void (*kernel)(P...), void* const* parameters, const Launch& launch) {
  const Call<P...> call{kernel, parameters};
  return run(launch, Call<P...>::body, &call);
}
// Bytes of each parameter, then 0
template <class... P>
inline const size_t* sizes(void (*)(P...)) {
  static const size_t bytes[] = {sizeof(P)..., 0};
  return bytes;
}

}  // namespace device

extern "C" {
extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));
}
#define EXPORTED __attribute__((visibility("default")))
#define EMULATED_KERNEL(name, cluster)                                                                      \
  extern "C" EXPORTED int emulate_##name(unsigned blocks, unsigned threads, size_t shared,                    \
                                void* const* parameters, unsigned side_by_side, uint64_t seed) {     \
    return device::launch(name, parameters, {#name, blocks, threads, shared, side_by_side, seed,     \
                                             __start_shared_memory, __stop_shared_memory, WATCHES_ORDER}); \
  }                                                                                                  \
  extern "C" EXPORTED const size_t* sizes_##name() { return device::sizes(name); }                    \
  extern "C" EXPORTED int cluster_##name() { return cluster; }
