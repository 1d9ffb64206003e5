// Two GPUs of a node exchange small arrays. Each GPU launches this kernel once, and the kernel waits for the kernel of
// the other GPU. Each GPU maps the memory of the other (distributed/transports/peers.py).
#include "common.cuh"

constexpr int SWAP_THREADS = 256;

// Up to four arrays, and their bytes; null: none.
struct Arrays {
  char *first, *second, *third, *fourth;
  i64 first_bytes, second_bytes, third_bytes, fourth_bytes;

  __device__ __forceinline__ char* at(int i) const { return i < 2 ? i ? second : first : i == 2 ? third : fourth; }
  __device__ __forceinline__ i64 bytes(int i) const {
    return i < 2 ? i ? second_bytes : first_bytes : i == 2 ? third_bytes : fourth_bytes;
  }
};

// One side of a channel: two buffers, which swaps use in turn, and for each thread block the number of a swap.
struct Side {
  char* buffers;
  u32* arrived;  // the number of the last swap whose part for this thread block is in the buffers
};

// Copies in units of T. Another GPU may have written the source, so loads bypass the L1 cache.
template <class T>
__device__ __forceinline__ void copy_units(char* to, const char* from, i64 size) {
  for (i64 i = threadIdx.x * sizeof(T); i < size; i += SWAP_THREADS * sizeof(T))
    *(T*)(to + i) = __ldcg((const T*)(from + i));
}

__device__ __forceinline__ void copy(char* to, const char* from, i64 size) {
  const u64 all = (u64)to | (u64)from | (u64)size;
  if (all % 16 == 0) copy_units<uint4>(to, from, size);
  else if (all % 8 == 0) copy_units<uint2>(to, from, size);
  else copy_units<char>(to, from, size);
}

// Copies this block's part of the arrays to or from a buffer, in which each array begins at a multiple of 16 bytes.
__device__ __forceinline__ void share(const Arrays& arrays, char* buffer, bool send) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const i64 size = arrays.bytes(i), padded_size = (size + 15) / 16 * 16;
    const i64 each = (size + gridDim.x * 16 - 1) / (gridDim.x * 16) * 16, first = blockIdx.x * each;
    const i64 own = first < size ? min(each, size - first) : 0;
    if (send) copy(buffer + first, arrays.at(i) + first, own);
    else copy(arrays.at(i) + first, buffer + first, own);
    buffer += padded_size;
  }
}

// `counters` has the number of the last swap for each thread block. Two buffers suffice: a rank that begins swap i has
// received the other rank's part of swap i - 1, so the other rank has read this rank's part of swap i - 2, whose
// buffer swap i overwrites.
extern "C" __global__ void __launch_bounds__(SWAP_THREADS)
swap(const __grid_constant__ Arrays sent, const __grid_constant__ Arrays received,
     const __grid_constant__ Side other, const __grid_constant__ Side own, u32* counters, i64 room) {
  const u32 number = counters[blockIdx.x] + 1;
  const i64 turn = number % 2 * room;
  share(sent, other.buffers + turn, true);
  __threadfence_system();
  __syncthreads();  // all threads have written, and read the counter
  if (threadIdx.x == 0) {
    store_release_system(other.arrived + blockIdx.x, number);
    while ((int)(load_acquire_system(own.arrived + blockIdx.x) - number) < 0) __nanosleep(20);
    counters[blockIdx.x] = number;
  }
  __syncthreads();
  share(received, own.buffers + turn, false);
}
