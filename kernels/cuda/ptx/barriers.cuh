// Barriers of several warps of a block, of a cluster, and Hopper's mbarriers.
#pragma once

// A named barrier for several warps of a block, which have `threads` threads. Barrier 0 is __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrive at a named barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- Hopper -----------------------------------------------------------------------------------------
//
// Clusters and these mbarriers are used only on compute capability 9.0. An mbarrier counts arrivals and bytes;
// a waiter names the parity of the phase that it waits for.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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

#endif
