// Two ranks of a node exchange small arrays between their GPUs. Each GPU launches this kernel, which writes the arrays
// into the mailbox of the other GPU, and waits until the kernel of the other GPU has written into its own mailbox. Each
// GPU maps the mailbox of the other (distributed/transports/mailboxes.py). Large arrays go by copy engines
// (distributed/transports/peers.py).
#include "common.cuh"

constexpr int SWAP_THREADS = 256;

// Up to four arrays and their sizes in bytes. Unused arrays are null, with 0 bytes.
struct Arrays {
  char *first, *second, *third, *fourth;
  i64 first_bytes, second_bytes, third_bytes, fourth_bytes;

  __device__ __forceinline__ char* at(int i) const { return i < 2 ? i ? second : first : i == 2 ? third : fourth; }
  __device__ __forceinline__ i64 bytes(int i) const {
    return i < 2 ? i ? second_bytes : first_bytes : i == 2 ? third_bytes : fourth_bytes;
  }
};

// A mailbox in the memory of one GPU: two buffers of `room` bytes each, which swaps use alternately, and for each
// thread block the number of a swap.
struct Mailbox {
  char* buffers;
  u32* arrived;  // [thread blocks] the number of the last swap whose part for this thread block is in a buffer
};

// Copies `size` bytes in units of T, by all threads of a thread block. Another GPU may have written the source, so
// loads bypass the L1 cache.
template <class T>
__device__ __forceinline__ void copy_units(char* to, const char* from, i64 size) {
  for (i64 i = threadIdx.x * sizeof(T); i < size; i += SWAP_THREADS * sizeof(T))
    *(T*)(to + i) = __ldcg((const T*)(from + i));
}

// Copies `size` bytes in the largest units that addresses and size allow.
__device__ __forceinline__ void copy(char* to, const char* from, i64 size) {
  const u64 all = (u64)to | (u64)from | (u64)size;
  if (all % 16 == 0) copy_units<uint4>(to, from, size);
  else if (all % 8 == 0) copy_units<uint2>(to, from, size);
  else copy_units<char>(to, from, size);
}

// Copies this thread block's part of each array to `buffer` (`send`), or from it. In the buffer, each array begins at a
// multiple of 16 bytes.
__device__ __forceinline__ void share(const Arrays& arrays, char* buffer, bool send) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const i64 size = arrays.bytes(i), padded_size = (size + 15) / 16 * 16;
    const i64 block_bytes = (size + gridDim.x * 16 - 1) / (gridDim.x * 16) * 16, first = blockIdx.x * block_bytes;
    const i64 own = first < size ? min(block_bytes, size - first) : 0;
    if (send) copy(buffer + first, arrays.at(i) + first, own);
    else copy(arrays.at(i) + first, buffer + first, own);
    buffer += padded_size;
  }
}

// `sent` is written to `other`, the mailbox of the other GPU, and `received` is read from `own`. `counters` has, for
// each thread block, the number of the last swap; both GPUs launch the same number of thread blocks.
//
// Two buffers suffice. Swap i of rank A overwrites the buffer in which rank B received A's part of swap i - 2. B has
// read that part before, for this reason: A has ended swap i - 1, so A has received B's part of swap i - 1. B sent that
// part after B's swap i - 2 had ended, in which B read A's part.
extern "C" __global__ void __launch_bounds__(SWAP_THREADS)
swap(const __grid_constant__ Arrays sent, const __grid_constant__ Arrays received,
     const __grid_constant__ Mailbox other, const __grid_constant__ Mailbox own, u32* counters, i64 room) {
  const u32 number = counters[blockIdx.x] + 1;
  const i64 turn = number % 2 * room;  // offset of the buffer of this swap
  share(sent, other.buffers + turn, true);
  __threadfence_system();
  __syncthreads();  // all threads have written their part, and read the counter
  if (threadIdx.x == 0) {
    store_release_system(other.arrived + blockIdx.x, number);
    // The other GPU may be one swap ahead, so its number may be larger
    while ((int)(load_acquire_system(own.arrived + blockIdx.x) - number) < 0) __nanosleep(20);
    counters[blockIdx.x] = number;
  }
  __syncthreads();  // the other rank's part is in the buffer before this thread block reads it
  share(received, own.buffers + turn, false);
}
