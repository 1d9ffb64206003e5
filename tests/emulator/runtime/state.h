// What the device knows of the launch that it runs.
#pragma once
#include <string.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "../headers/device.h"

namespace device {

struct Block;
struct Warp;
struct Fiber;

// The last release that a lane has seen of each lane of its warp: order.cpp
struct Seen {
  uint32_t releases[32] = {};
  void join(const Seen& other);
};

// Threads that arrived somewhere, and how often all were complete
struct Meeting {
  uint32_t generation = 0;
  int expected = 0;
  std::vector<Fiber*> arrived;
  std::map<const Warp*, Seen> released;  // by all arrivals so far
};
struct Barrier : Meeting {
  int votes = 0, result = 0;  // of __syncthreads_or
};
// Lanes of a warp come together for one instruction
struct Lanes : Meeting {
  unsigned mask = 0;
  Operation operation = nullptr;
  Place at{};
  void* all[32];
};
struct Mbarrier : Meeting {
  long offset = 0;    // in shared memory
  Place initialised{};
  bool fenced = false;
  int64_t bytes = 0;  // of copies that the phase waits for
};

// A lane can go on while (*word & mask) != value. At first it can
inline const uint32_t always = 1;
struct Condition {
  const uint32_t* word = &always;
  uint32_t mask = 1, value = 0;
  bool holds() const { return (*word & mask) != value; }
};
constexpr Condition NEVER{&always, 0, 0};
struct Wait : Condition {
  const Meeting* meeting = nullptr;
  const char* what = "";
};

struct AsyncCopy {
  char* to;
  const char* from;
  unsigned bytes, zeros;
  Place at;
};
struct BoxStore {
  TensorMap map;
  int64_t from;  // in shared memory
  int x, y;
  Place at;
  bool read = false;
  std::vector<char> box;
};

struct Fiber : Thread {
  Block* home = nullptr;
  Warp* warp = nullptr;
  void* stack = nullptr;
  bool done = false, polls = false, polls_others = false;
  uint32_t arrivals[16] = {};  // by named barrier: the phase after the one in which it arrived last
  Wait wait;
  Place at{};  // of the last synchronisation
  Seen seen;
  std::vector<std::vector<AsyncCopy>> copies;  // groups, oldest first
  std::vector<AsyncCopy> open_copies;
  std::vector<BoxStore> stores;
  std::vector<Mbarrier*> unfenced;
};

// A product that tensor cores have still to do for a warp
struct WarpProduct {
  Product of;
  Fiber* by;
  unsigned warp;  // in its warpgroup
  float *x[32], *y[32];
  uint32_t rows[32][4];
  Place at;
};
// Rows of 16 bytes that stmatrix has written, and the lanes that have not fenced them
struct Written {
  int64_t offset;
  unsigned lanes;
};
// How often a warp or a block has its turn: for a while always, or half the time, or hardly ever
struct Pace {
  unsigned rest = 0;  // of 64 turns, those that it leaves out
  unsigned turns = 0;  // until another pace
  uint32_t lagging = 0;  // lanes of a warp that have no turn in the meantime
  bool rests(unsigned most_turns);
};
struct Warp {
  Condition conditions[32];  // of its lanes: in one place, for the scheduler reads them all in every turn
  Lanes meetings[33];  // of all lanes; of the lanes from each one on
  bool products_fenced = false;
  std::vector<std::vector<WarpProduct>> products;  // groups, oldest first
  std::vector<WarpProduct> open_products;
  std::vector<Written> written;
  Pace pace;
};

struct Block {
  Index index{};
  unsigned rank = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Mbarrier*> mbarriers;  // by their place in shared memory, in 8 bytes
  Barrier named[16];
  Pace pace;
  int alive = 0;
  bool ended = false;
  char* shared = nullptr;
  std::vector<char> statics;  // while another block runs
};

// A copy by TMA that is under way
struct Load {
  Fiber* by;
  TensorMap map;
  int64_t to, mbarrier;  // in shared memory
  int x, y, first, last;  // of the box's rows
  unsigned blocks;
  Place at;
};

struct Device {
  Launch launch{};
  std::vector<Block> group;  // blocks side by side
  Barrier cluster;
  std::vector<Load> loads;
  Pace copy_engine;
  Block* resident = nullptr;  // whose static shared memory is in its place
  bool random = false;
  uint64_t random_state = 1;
  std::string error, fault_library;
  uint64_t fault_offset = 0;

  uint64_t next_random();
  bool chance(unsigned one_in) { return random && next_random() % one_in == 0; }
};
extern Device state;

inline Fiber& me() { return *(Fiber*)current; }
inline Warp& my_warp() { return *me().warp; }
inline Block& my_block() { return *me().home; }

// schedule.cpp
void wait_until_complete(const Meeting& meeting, const char* what, Place at);
void wait_for(Wait wait, Place at);
void let_others_go_first(Place at);  // at random
bool is_on_a_stack(const void* address);
[[noreturn]] void unordered_access(const void* address, bool writes, const Fiber& other, bool other_writes,
                                   const void* instruction);
// order.cpp
void forget_accesses();
void release(Meeting& meeting);        // this thread's accesses so far
void acquire(const Meeting& meeting);  // those that others have released
// barriers.cpp
bool thread_ended(Fiber& fiber);
Mbarrier* find_mbarrier(Block& block, int64_t offset);
void complete_bytes(Mbarrier& mbarrier, int64_t bytes);
std::string describe(const Wait& wait, Place at);
std::string threads_of(const std::vector<const Fiber*>& fibers);
// copies.cpp
bool finish_load();
void block_ended(Block& block);
void carry_out(std::vector<AsyncCopy>& copies);
char* shared_range(Block& block, int64_t offset, size_t bytes, Place at);
// products.cpp
bool move_products(Warp& warp);
// memory.cpp
// `inside`: what to add where the address is inside an array
std::string describe_address(const void* address, const char* inside = ", which has ended");
char* new_shared(size_t bytes);
void free_shared(char* memory, size_t bytes);
void end_shared(char* memory, size_t bytes);
std::string damage();  // of bytes around arrays
struct FaultHandler {  // while a launch runs
  FaultHandler();
  ~FaultHandler();
};

}  // namespace device
