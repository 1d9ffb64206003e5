// The emulated device, as kernels see it. A thread is a fiber; runtime/ has the functions.
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
namespace device {

struct Index {
  unsigned x, y, z;
};

// A line of the kernels' sources. As a default argument, `Place at = here()` is the caller's.
struct Place {
  const char* file;
  int line;
};
constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return {file, line};
}

struct Thread {
  Index thread, block;
  unsigned rank;        // of the block in its cluster
  char* shared;         // dynamic shared memory of the block
  uint32_t lane() const { return thread.x % 32; }
};
extern Thread* current;
extern Index grid, block_size;

// Stops the launch with a message that names kernel, block, thread and line.
[[noreturn]] void fail(Place at, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Notes that a launch has come to a place, one of 1024: tools/mutants.py numbers them.
void reach(unsigned place);

// --- warps: warps.cpp -----------------------------------------------------------------------------------

// What the last lane of a mask does for all when it arrives. `all` has what each lane has brought.
typedef void (*Operation)(void** all, unsigned mask, Place at);
void together(unsigned mask, Operation operation, void* mine, Place at);
uint64_t shuffle(unsigned mask, uint64_t x, int from, Place at);
unsigned ballot(unsigned mask, bool vote, Place at);

// --- barriers: barriers.cpp -----------------------------------------------------------------------------

int sync_block(int vote, Place at);  // whether any thread votes
void sync_named(int barrier, int threads, Place at);
void arrive_named(int barrier, int threads, Place at);
void sync_cluster(Place at);
// A thread that polls memory lets others go on. `other_processes`: whether another process may write that memory, so
// that the launch waits longer before it reports a wait that never ends.
void pause(bool other_processes, Place at);

void init(uint64_t& mbarrier, unsigned arrivals, Place at);
void fence_inits(Place at);
void wait(uint64_t& mbarrier, unsigned parity, Place at);
void arrive(uint64_t& mbarrier, unsigned bytes, Place at);
void arrive_at(uint64_t& mbarrier, unsigned block, Place at);

// --- copies: copies.cpp ---------------------------------------------------------------------------------

void copy_async(void* to, const void* from, unsigned bytes, unsigned zeros, Place at);
void commit_copies();
void wait_for_copies(int groups, Place at);

// Rows of `width` bytes, `stride` bytes apart, copied in boxes of `box_rows` rows by 128 bytes.
struct alignas(128) TensorMap {
  char* data;
  int64_t rows, width, stride, box_rows, item;
};
void load_box(void* to, const TensorMap& map, uint64_t& mbarrier, int x, int y, unsigned blocks, Place at);
void fence_stores(Place at);  // after it, TMA stores may read what this lane has written by stmatrix
void store_box(const TensorMap& map, const void* from, int x, int y, Place at);
void wait_for_stores(bool complete, Place at);  // else: until shared memory is read

// --- tensor cores: products.cpp -------------------------------------------------------------------------

enum class Number { BF16, FP16, TF32 };
void load_matrices(uint32_t (&r)[4], const void* row, Place at);
void store_matrices(void* row, const uint32_t (&r)[4], Place at);
void multiply(Number number, float* (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Place at);

// 64 rows of a warpgroup times `columns` columns. Rows come from shared memory, or from registers.
struct Product {
  Number number;
  int columns;          // of the result
  bool add;             // to what the result is
  uint32_t a, b;        // lower halves of descriptors
  const uint32_t* registers;  // of the rows, or null
  float *x, *y;         // of the first 128 columns and of those beyond
};
void multiply_async(const Product& product, Place at);
void fence_products(Place at);
void commit_products(Place at);
void wait_for_products(int groups, Place at);

// --- launches: schedule.cpp -----------------------------------------------------------------------------

struct Launch {
  const char* kernel;
  unsigned blocks, threads;
  size_t shared;          // bytes of dynamic shared memory
  unsigned side_by_side;  // blocks: those of a cluster, or the whole grid
  uint64_t seed;          // 0: threads in their order, everything asynchronous at once
  char *statics, *statics_end;  // static shared memory
  bool watches_order;     // of accesses to memory: order.cpp
};
// Runs `body(data)` as each thread. 0, or 1: `emulator_error` has the message.
int run(const Launch& launch, void (*body)(const void*), const void* data);

}  // namespace device
#pragma GCC visibility pop
