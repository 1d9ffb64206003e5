// Hopper's copy engine. Its copies are asynchronous: an mbarrier tells when a load is complete.
#pragma once
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct __align__(128) TensorMap {  // how a matrix lies in memory, written by the driver
  unsigned char opaque[128];
};

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

#endif
