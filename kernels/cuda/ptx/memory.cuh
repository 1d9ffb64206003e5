// Memory: flags between blocks and between GPUs, prefetches, copies from global to shared memory.
#pragma once

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

// --- copies from global to shared memory -------------------------------------------------------------

// The 128 bytes around an address are to be in the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// 16 bytes, of which the last 16 - bytes are zeros; asynchronous if the chip can.
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
