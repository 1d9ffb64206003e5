// Copies: cp.async, and TMA from and to global memory. In the plain schedule (seed 0) each copy is done when it begins.
// In a random schedule
// - half of all cp.async are done when they begin, the others in `wait_for_copies`;
// - a TMA load waits in state.loads until the scheduler (schedule.cpp) calls `finish_load` between turns of threads;
// - a TMA store reads shared memory when it begins or in a wait for stores; only a wait that is `complete`, or the end
//   of the block, writes global memory.
#include "state.h"

namespace device {

namespace {

constexpr int BOX_BYTES = 128;  // of a row of a box
constexpr int CHUNK = 16;       // bytes that the swizzle moves together

uint64_t swizzled(uint64_t at) { return at ^ (at >> 7 & 7) << 4; }  // 128-byte swizzle

void carry_out_one(const AsyncCopy& copy) {
  memcpy(copy.to, copy.from, copy.bytes);
  memset(copy.to + copy.bytes, 0, copy.zeros);
}

void check(const TensorMap& map, int64_t shared, Place at) {
  if (map.item != 2 || map.box_rows < 1 || map.box_rows > 256) fail(at, "TMA: expected a tensor map");
  if ((uint64_t)map.data % 16 || map.stride % 16 || map.width % 2)
    fail(at, "TMA: expected rows at multiples of 16 bytes, got %p and %ld bytes from row to row", (void*)map.data,
         (long)map.stride);
  if (shared % BOX_BYTES) fail(at, "TMA: expected a multiple of 128 in shared memory, got %ld", (long)shared);
}

// Copies rows of the box into every block of the cluster that `load.blocks` names. `current` is meanwhile the thread
// that began the copy, for the report of a fault.
void carry_out(const Load& load) {
  current = load.fiber;
  const TensorMap& map = load.map;
  const int64_t column = load.x * map.item;
  for (unsigned rank = 0; rank < state.blocks.size(); ++rank) {
    if (!(load.blocks >> rank & 1)) continue;
    Block& block = state.blocks[rank];
    if (block.ended) fail(load.at, "TMA: a copy arrives in block %u, which has ended", block.index.x);
    char* shared = shared_range(block, load.to, (size_t)map.box_rows * BOX_BYTES, load.at);
    for (int r = load.first; r < load.last; ++r) {
      const int64_t row = load.y + r;
      const char* from = row >= 0 && row < map.rows ? map.data + row * map.stride : nullptr;
      for (int c = 0; c < BOX_BYTES; c += CHUNK) {  // the swizzle keeps the order of bytes in a chunk
        const int64_t first = std::max<int64_t>(column + c, 0), end = std::min(column + c + CHUNK, map.width);
        char chunk[CHUNK] = {};  // zeros outside of the array
        if (from && end - first == CHUNK) memcpy(chunk, from + first, CHUNK);
        else if (from && first < end) memcpy(chunk + (first - column - c), from + first, (size_t)(end - first));
        memcpy(shared + (swizzled((uint64_t)(load.to + r * BOX_BYTES + c)) - (uint64_t)load.to), chunk, CHUNK);
      }
    }
    Mbarrier* mbarrier = find_mbarrier(block, load.mbarrier);
    if (!mbarrier) fail(load.at, "TMA: block %u has no mbarrier at shared memory + %ld", block.index.x, (long)load.mbarrier);
    if (!mbarrier->fenced) fail(load.at, "TMA: an mbarrier is used without a fence after its initialisation");
    complete_bytes(*mbarrier, (int64_t)(load.last - load.first) * BOX_BYTES);
  }
  current = nullptr;
}

void read_box(BoxStore& store, Block& block) {
  const char* shared = shared_range(block, store.from, (size_t)store.map.box_rows * BOX_BYTES, store.at);
  store.box.resize((size_t)store.map.box_rows * BOX_BYTES);
  for (size_t i = 0; i < store.box.size(); i += 16)
    memcpy(&store.box[i], shared + (swizzled((uint64_t)store.from + i) - (uint64_t)store.from), 16);
  store.read = true;
}
void write_box(const BoxStore& store) {
  const TensorMap& map = store.map;
  for (int64_t r = 0; r < map.box_rows; ++r)
    for (int64_t c = 0; c < BOX_BYTES; c += 2) {
      const int64_t row = store.y + r, byte = store.x * map.item + c;
      if (row >= 0 && row < map.rows && byte >= 0 && byte < map.width)
        memcpy(map.data + row * map.stride + byte, &store.box[(size_t)(r * BOX_BYTES + c)], 2);
    }
}
// Reads the shared memory of all stores of a thread, the oldest first; if `complete`, also writes global memory. A wait
// of the thread and the end of its block call it.
void finish_stores(Fiber& fiber, bool complete) {
  for (BoxStore& store : fiber.stores)
    if (!store.read) read_box(store, *fiber.owner);
  if (!complete) return;
  // in a random order, because only a wait for all stores orders stores
  while (!fiber.stores.empty()) {
    const size_t i = state.random ? state.next_random() % fiber.stores.size() : 0;
    write_box(fiber.stores[i]);
    fiber.stores.erase(fiber.stores.begin() + (long)i);
  }
}

}  // namespace

char* shared_range(Block& block, int64_t offset, size_t bytes, Place at) {
  if (block.ended) fail(at, "shared memory of block %u, which has ended", block.index.x);
  if (offset < 0 || (size_t)offset + bytes > state.launch.shared)
    fail(at, "%zu bytes at shared memory + %ld, of which the block has %zu", bytes, (long)offset, state.launch.shared);
  return block.shared + offset;
}

// --- cp.async -------------------------------------------------------------------------------------------

void copy_async(void* to, const void* from, unsigned bytes, unsigned zeros, Place at) {
  me().at = at;
  const unsigned size = bytes + zeros;
  if ((uint64_t)to % size || (bytes && (uint64_t)from % size)) fail(at, "cp.async of %u bytes: expected multiples of that", size);
  const AsyncCopy copy{(char*)to, (const char*)from, bytes, zeros, at};
  if (!state.random || state.chance(2)) carry_out_one(copy);
  else me().open_copies.push_back(copy);
}

void commit_copies() {
  me().copies.push_back(std::move(me().open_copies));
  me().open_copies.clear();
}

void carry_out(std::vector<AsyncCopy>& copies) {
  for (const AsyncCopy& copy : copies) carry_out_one(copy);
  copies.clear();
}

void wait_for_copies(int groups, Place at) {
  me().at = at;
  std::vector<std::vector<AsyncCopy>>& all = me().copies;
  while ((int)all.size() > groups) {
    carry_out(all.front());
    all.erase(all.begin());
  }
}

// --- TMA ------------------------------------------------------------------------------------------------

void load_box(void* to, const TensorMap& map, uint64_t& mbarrier, int x, int y, unsigned blocks, Place at) {
  let_others_go_first(at);
  const int64_t offset = (char*)to - current->shared;
  check(map, offset, at);
  if (blocks == 0 || blocks >> state.blocks.size()) fail(at, "TMA: blocks %#x of a cluster of %zu", blocks, state.blocks.size());
  Load load{&me(), map, offset, (char*)&mbarrier - current->shared, x, y, 0, (int)map.box_rows, blocks, at};
  if (!state.random) {
    carry_out(load);
    current = load.fiber;
    return;
  }
  if (state.chance(2) && map.box_rows > 1) {  // the box may arrive in two pieces
    Load rest = load;
    load.last = rest.first = 1 + (int)(state.next_random() % (uint64_t)(map.box_rows - 1));
    state.loads.push_back(rest);
  }
  state.loads.push_back(load);
}

void fence_stores(Place at) {
  let_others_go_first(at);
  for (Written& written : my_warp().written) written.lanes &= ~(1u << current->lane());
}

void store_box(const TensorMap& map, const void* from, int x, int y, Place at) {
  let_others_go_first(at);
  const int64_t offset = (const char*)from - current->shared;
  check(map, offset, at);
  std::vector<Written>& written = my_warp().written;
  for (const Written& w : written)
    if (w.lanes && w.offset + 16 > offset && w.offset < offset + map.box_rows * BOX_BYTES)
      fail(at, "TMA: a store reads what lanes %#x have written without a fence", w.lanes);
  std::vector<Written> left;
  for (const Written& w : written)
    if (w.lanes) left.push_back(w);
  written = left;
  BoxStore store{map, offset, x, y, at, false, {}};
  if (!state.random || state.chance(2)) read_box(store, my_block());
  if (!state.random) write_box(store);
  else me().stores.push_back(store);
}

void wait_for_stores(bool complete, Place at) {
  let_others_go_first(at);
  finish_stores(me(), complete);
}

// --- copies that are under way ----------------------------------------------------------------------------------

// Does one of the loads that are under way, chosen at random. Returns whether there was one. Only the scheduler calls
// it, after each round of turns of threads (`schedule`), and only a random schedule has such loads.
bool finish_load() {
  if (state.loads.empty()) return false;
  const size_t i = state.next_random() % state.loads.size();
  const Load load = state.loads[i];
  state.loads.erase(state.loads.begin() + (long)i);
  carry_out(load);
  return true;
}

// The last thread of a block that ends calls it.
void block_ended(Block& block) {
  for (const Load& load : state.loads)
    if (load.blocks >> block.rank & 1) fail(load.at, "TMA: block %u ends while this copy to it is under way", block.index.x);
  for (Fiber& fiber : block.fibers) {
    for (const BoxStore& store : fiber.stores)
      if (!store.read) fail(store.at, "TMA: the block ends before this store has read its shared memory");
    finish_stores(fiber, true);
  }
  block.ended = true;
  end_shared(block.shared, state.launch.shared);
}

}  // namespace device
