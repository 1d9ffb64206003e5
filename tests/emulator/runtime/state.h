// The state of the device during a launch.
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

// A place where threads arrive. A phase is complete when all have arrived; then the next phase begins.
struct Meeting {
  uint32_t generation = 0;  // number of complete phases
  int expected = 0;         // arrivals in a phase
  std::vector<Fiber*> arrived;  // in this phase
  std::map<const Warp*, Seen> released;  // by all arrivals so far
};
struct Barrier : Meeting {
  int votes = 0, result = 0;  // of __syncthreads_or
};
// The meeting of lanes of a warp for one instruction
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
  int64_t bytes = 0;  // that copies have still to bring before the phase is complete
};

// A lane waits as long as (*word & mask) == value. With the default condition a lane goes on at once, and with
// WAITS_FOREVER it never goes on.
inline const uint32_t always = 1;
struct Condition {
  const uint32_t* word = &always;
  uint32_t mask = 1, value = 0;
  bool lets_go_on() const { return (*word & mask) != value; }
};
constexpr Condition WAITS_FOREVER{&always, 0, 0};
struct Wait : Condition {
  const Meeting* meeting = nullptr;  // null: the lane does not wait
  const char* what = "";             // the name of the meeting in reports
};
// A wait for the end of the phase that has begun
inline Wait until_next_phase(const Meeting& meeting, const char* what) {
  return {{&meeting.generation, ~0u, meeting.generation}, &meeting, what};
}

struct AsyncCopy {
  char* to;
  const char* from;
  unsigned bytes, zeros;
  Place at;
};
// A copy by TMA from shared memory to global memory
struct BoxStore {
  TensorMap map;
  int64_t from;  // in shared memory
  int x, y;
  Place at;
  bool read = false;      // whether `box` has the bytes of shared memory
  std::vector<char> box;
};

struct Fiber : Thread {
  Block* owner = nullptr;  // the block of this thread
  Warp* warp = nullptr;
  void* stack = nullptr;
  bool done = false;
  bool polls = false, polls_others = false;  // polls memory; memory that another process may write
  uint32_t arrivals[16] = {};  // for each named barrier: 1 + the phase of the last arrival; 0: none
  const Wait* wait = nullptr;  // on this thread's stack; null: the thread does not wait
  Place at{};  // of the last synchronisation
  Seen seen;
  std::vector<std::vector<AsyncCopy>> copies;  // by committed group, oldest first
  std::vector<AsyncCopy> open_copies;          // of the group that is not committed yet
  std::vector<BoxStore> stores;                // whose global memory is not written yet
  std::vector<Mbarrier*> unfenced;             // initialised by this thread without a fence since
};

// A product that tensor cores have still to do for a warp
struct WarpProduct {
  Product operands;
  Fiber* fiber;  // which began the product
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
// How often a warp, a block or the copy engine has a turn in a random schedule: for a while always (two times in five),
// or half of the time, or 2 times of 64, or never
struct Pace {
  unsigned rest = 0;     // number of turns, of 64, that are skipped on average
  unsigned turns = 0;    // number of turns until another pace
  uint32_t lagging = 0;  // lanes of the warp that have no turn until then
  bool skips_turn(unsigned most_turns);
};
struct Warp {
  Condition conditions[32];  // of its lanes: side by side, because the scheduler reads all in every turn
  Lanes meetings[33];  // 0: of all lanes; 1 + i: of masks whose first lane is i
  bool products_fenced = false;
  std::vector<std::vector<WarpProduct>> products;  // by committed group, oldest first
  std::vector<WarpProduct> open_products;          // of the group that is not committed yet
  std::vector<Written> written;
  Pace pace;
};

struct Block {
  Index index{};
  unsigned rank = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Mbarrier*> mbarriers;  // one for each 8 bytes of shared memory; null: not initialised
  Barrier named_barriers[16];        // 0: __syncthreads
  Pace pace;
  int alive = 0;
  bool ended = false;
  char* shared = nullptr;
  std::vector<char> statics;  // the static shared memory, while another block runs
};

// A copy by TMA to shared memory that is under way
struct Load {
  Fiber* fiber;  // which began the copy
  TensorMap map;
  int64_t to, mbarrier;  // in shared memory
  int x, y, first, last;  // rows first .. last - 1 of the box at (x, y)
  unsigned blocks;        // bit r: also into block r of the cluster
  Place at;
};

struct Device {
  Launch launch{};
  std::vector<Block> blocks;  // the blocks that run side by side
  Barrier cluster;
  std::vector<Load> loads;  // those under way, in a random schedule only
  Pace copy_engine;         // how often loads arrive
  Block* resident = nullptr;  // the block whose static shared memory is at its address
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
inline Block& my_block() { return *me().owner; }

// schedule.cpp
void wait_for(const Wait& wait, Place at);
void let_others_go_first(Place at);  // in a random schedule, one time in 8
bool is_on_a_stack(const void* address);
[[noreturn]] void unordered_access(const void* address, bool writes, const Fiber& other, bool other_writes,
                                   const void* instruction);
// order.cpp
void forget_accesses();
void note_release(Meeting& meeting);        // this thread's accesses so far are before the meeting
void note_acquire(const Meeting& meeting);  // accesses that others have released are before this thread's next ones
// barriers.cpp
void thread_ended(Fiber& fiber);
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
bool do_one_product(Warp& warp);
// memory.cpp
// `inside`: the end of the text for an address inside an array
std::string describe_address(const void* address, const char* inside = ", which has ended");
char* new_shared(size_t bytes);
void free_shared(char* memory, size_t bytes);
void end_shared(char* memory, size_t bytes);
std::string find_damage();  // a report of bytes around arrays that a thread has written; "": none
struct FaultHandler {  // while a launch runs
  FaultHandler();
  ~FaultHandler();
};

}  // namespace device
