// Finds the tiles of the logit matrix that have a positive, if positives are pairs of equal positive ids (PositiveIds
// in block/options.cuh). A sweep compares the ids of the pairs of these tiles, and of no others.
#include "block/options.cuh"

// TILE: rows and columns of a tile. SLOTS: slots of the hash table, eight for each id. NONE: an empty slot
constexpr int TILE = POSITIVE_TILE, TILES_OF_BYTE = 8, THREADS = 256, SLOTS = 1024, NONE = -1;

// The different ids of up to TILE queries, as a hash table. If the slot of an id is taken, the next free slot is used.
struct Ids {
  i64 ids[TILE];
  int slots[SLOTS];  // indices into `ids`, or NONE

  __device__ __forceinline__ static int next(int slot) { return (slot + 1) % SLOTS; }
  __device__ __forceinline__ static int first(i64 id) {
    return (int)((u64)id * 0x9e3779b97f4a7c15ull >> 54);  // the upper ten bits
  }
  __device__ __forceinline__ void insert(int index) {
    for (int slot = first(ids[index]);; slot = next(slot)) {
      const int other = atomicCAS(slots + slot, NONE, index);
      if (other == NONE || ids[other] == ids[index]) return;
    }
  }
  __device__ __forceinline__ bool contains(i64 id) const {
    int slot = first(id);
    for (; slots[slot] != NONE; slot = next(slot))
      if (ids[slots[slot]] == id) return true;
    return false;
  }
};

// Writes tiles [query tiles, row_bytes]: bit t % 8 of tiles[q, t / 8] is 1 if a query of query tile q and a key of key
// tile t have equal ids. A thread block has one query tile, and each of its warps has the eight key tiles of one byte.
extern "C" __global__ void __launch_bounds__(THREADS)
find_positive_tiles(const i64* query_ids, i64 m, const i64* key_ids, i64 n, i64 row_bytes, char* tiles) {
  __shared__ Ids queries;
  const i64 parts = (row_bytes + THREADS / 32 - 1) / (THREADS / 32), query_tile = blockIdx.x / parts;
  for (int slot = threadIdx.x; slot < SLOTS; slot += THREADS) queries.slots[slot] = NONE;
  const i64 row = query_tile * TILE + threadIdx.x;
  const bool has_query = threadIdx.x < TILE && row < m;
  if (has_query) queries.ids[threadIdx.x] = query_ids[row];
  __syncthreads();  // all ids and empty slots are written before the first insertion
  if (has_query) queries.insert(threadIdx.x);
  __syncthreads();  // all insertions come before the first search
  const int lane = threadIdx.x % 32;
  const i64 byte = blockIdx.x % parts * (THREADS / 32) + threadIdx.x / 32;
  if (byte >= row_bytes) return;
  int tile_bits = 0;
  for (int t = 0; t < TILES_OF_BYTE; ++t) {
    const i64 first = (byte * TILES_OF_BYTE + t) * TILE;
    i64 ids[TILE / 32];
#pragma unroll
    for (int i = 0; i < TILE / 32; ++i) {  // loads first: they need not wait for one another
      const i64 key = first + i * 32 + lane;
      ids[i] = key < n ? key_ids[key] : 0;
    }
    bool any = false;
#pragma unroll
    for (int i = 0; i < TILE / 32; ++i) any |= first + i * 32 + lane < n && queries.contains(ids[i]);
    if (__any_sync(ALL_LANES, any)) tile_bits |= 1 << t;
  }
  if (lane == 0) tiles[query_tile * row_bytes + byte] = (char)tile_bits;
}
