// Launches: blocks run one after another, or some side by side. A scheduler, itself a fiber, resumes the threads
// that need not wait. Seeds let warps, lanes and copies lag (struct Pace of state.h): a missing barrier between warps
// then shows by wrong results, and one between lanes of a warp by order.cpp.
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <time.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>

#include "fibers.h"
#include "state.h"

namespace device {

Device state;
Thread* current;
Index grid, block_size;

namespace {

constexpr int PASSES = 64;          // over the warps of a block, before other blocks have their turn
constexpr unsigned RESTS = 64;      // `Pace::rest` is a number of turns out of so many
constexpr unsigned WARP_TURNS = 1024, BLOCK_TURNS = 4096;  // the most turns until a warp or a block gets another pace
// How long threads may poll memory while nothing else happens. Then they wait for ever.
constexpr int IDLE_ROUNDS = 20000;   // if only threads of this launch write the memory
constexpr double IDLE_SECONDS = 60;  // if another process may write it

pthread_t host_thread;  // the thread of the host that launches
void *main_context, *scheduler_context;
std::unique_ptr<Stacks> stacks;
unsigned char reached[1024];
void (*thread_body)(const void*);
const void* thread_data;

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

[[noreturn]] void end_launch() {
  void* unused;
  emulator_switch(&unused, main_context);
  abort();
}

void yield() { emulator_switch(&me().stack, scheduler_context); }

void thread_entry() {
  thread_body(thread_data);
  Fiber& fiber = me();
  fiber.done = true;
  fiber.warp->conditions[fiber.lane()] = WAITS_FOREVER;
  Block& block = *fiber.owner;
  thread_ended(fiber);
  if (--block.alive == 0) block_ended(block);
  yield();
  abort();
}

// Moves the static shared memory of a block, which has its turn now, to its address, which all blocks share.
void bring_statics(Block& block) {
  const size_t bytes = state.launch.statics_end - state.launch.statics;
  if (state.blocks.size() == 1 || bytes == 0 || state.resident == &block) return;
  if (state.resident) memcpy(state.resident->statics.data(), state.launch.statics, bytes);
  memcpy(state.launch.statics, block.statics.data(), bytes);
  state.resident = &block;
}

// Runs a thread until it waits. Returns whether it did more than poll memory.
bool resume(Fiber& fiber) {
  current = &fiber;
  emulator_switch(&scheduler_context, fiber.stack);
  current = nullptr;
  return !fiber.polls;
}

// A random order of n numbers: begins at one of them, and goes on in equal steps, modulo n, that visit each once
struct Order {
  size_t n, at, step;
  explicit Order(size_t n) : n(n), at(0), step(1) {
    if (!state.random || n < 2) return;
    const uint64_t random = state.next_random();
    at = (random >> 32) % n;
    step = 1 + (uint32_t)random % (n - 1);
    if ((n & (n - 1)) == 0) step |= 1;
    else
      while (std::gcd(step, n) != 1) step = 1 + state.next_random() % (n - 1);
  }
  size_t next() {
    const size_t here = at;
    at += step;
    if (at >= n) at -= n;
    return here;
  }
};

// Runs the lanes of a warp that need not wait, except `lagging` lanes. Returns whether a lane did more than poll.
bool run_warp(Block& block, size_t warp, uint32_t lagging) {
  bool moved = false;
  const size_t first = 32 * warp;
  const Condition* conditions = block.warps[warp].conditions;
  Order lanes(std::min<size_t>(32, block.fibers.size() - first));
  for (size_t l = 0; l < lanes.n; ++l) {
    const size_t lane = lanes.next();
    if (conditions[lane].lets_go_on() && !(lagging >> lane & 1)) moved |= resume(block.fibers[first + lane]);
  }
  return moved;
}

// Runs the warps of a block that do not rest. Returns whether one did more than poll.
bool run_warps(Block& block) {
  bool moved = false;
  Order warps(block.warps.size());
  for (size_t w = 0; w < warps.n; ++w) {
    const size_t warp = warps.next();
    if (block.warps[warp].pace.skips_turn(WARP_TURNS)) continue;
    moved |= run_warp(block, warp, block.warps[warp].pace.lagging);
    if (state.chance(8)) moved |= do_one_product(block.warps[warp]);  // else its wgmma waits for a later turn
  }
  return moved;
}

// Runs the blocks that do not rest. Returns whether a thread did more than poll.
bool run_round() {
  bool moved = false;
  Order blocks(state.blocks.size());
  for (size_t i = 0; i < blocks.n; ++i) {
    Block& block = state.blocks[blocks.next()];
    if (!block.alive || block.pace.skips_turn(BLOCK_TURNS)) continue;
    bring_statics(block);
    const int passes = state.random ? 1 + (int)(state.next_random() % 8) : PASSES;
    for (int p = 0; p < passes && block.alive; ++p) {
      if (!run_warps(block)) break;
      moved = true;
    }
  }
  return moved;
}

// Runs one warp, although it rests, if a round has moved nothing: first of the blocks that do not rest, then of others
bool wake_one() {
  for (const bool resting : {false, true}) {
    Order blocks(state.blocks.size());
    for (size_t i = 0; i < blocks.n; ++i) {
      Block& block = state.blocks[blocks.next()];
      if (!block.alive || (block.pace.rest == RESTS) != resting) continue;
      bring_statics(block);
      Order warps(block.warps.size());
      for (size_t w = 0; w < warps.n; ++w)
        if (run_warp(block, warps.next(), 0)) return true;
    }
  }
  return false;
}

std::string describe_waits() {
  std::string text = "threads wait for ever";
  int lines = 0;
  for (Block& block : state.blocks) {
    std::map<std::string, std::vector<const Fiber*>> waiting;
    for (const Fiber& fiber : block.fibers)
      if (!fiber.done) waiting[describe(fiber.wait ? *fiber.wait : Wait(), fiber.at)].push_back(&fiber);
    for (const auto& [what, fibers] : waiting) {
      if (++lines > 24) return text + "\n  ...";
      text += "\n  block " + std::to_string(block.index.x) + ", " + threads_of(fibers) + ": " + what;
    }
  }
  return text;
}

void schedule() {
  int idle = 0;
  double since = now();
  const auto alive = [] {
    for (const Block& block : state.blocks)
      if (block.alive) return true;
    return false;
  };
  while (alive()) {
    bool moved = run_round();
    // Two loads on average, unless the copy engine rests. (The plain schedule has none: `load_box` does them.)
    if (!state.copy_engine.skips_turn(BLOCK_TURNS))
      while (!state.chance(3) && finish_load()) moved = true;
    // All other threads rest. If copies are under way, half of the time a copy is done before a thread is woken
    if (moved || (state.chance(2) && finish_load()) || wake_one() || finish_load()) {
      idle = 0;
      continue;
    }
    bool polling = false, others = false;
    for (const Block& block : state.blocks)
      for (const Fiber& fiber : block.fibers)
        if (!fiber.done && fiber.polls) polling = true, others |= fiber.polls_others;
    if (idle++ == 0) since = now();
    if (others) {
      if (now() - since < IDLE_SECONDS) usleep(50);
      else polling = false;
    } else if (idle > IDLE_ROUNDS) polling = false;
    if (!polling) {
      state.error = describe_waits();
      end_launch();
    }
  }
}
void scheduler_entry() {
  schedule();
  end_launch();
}

void prepare(Block& block, unsigned index, unsigned rank, size_t& stack) {
  const Launch& launch = state.launch;
  block.index = {index, 0, 0}, block.rank = rank, block.alive = (int)launch.threads;
  block.shared = new_shared(launch.shared);
  block.mbarriers.assign(launch.shared / 8 + 1, nullptr);
  const size_t statics = launch.statics_end - launch.statics;
  block.statics.assign(statics, (char)0xff);
  if (launch.side_by_side == 1) memset(launch.statics, 0xff, statics);
  block.warps = std::vector<Warp>((launch.threads + 31) / 32);
  block.fibers = std::vector<Fiber>(launch.threads);
  for (unsigned t = 0; t < launch.threads; ++t) {
    Fiber& fiber = block.fibers[t];
    fiber.thread = {t, 0, 0}, fiber.block = block.index, fiber.rank = rank, fiber.shared = block.shared;
    fiber.owner = &block, fiber.warp = &block.warps[t / 32];
    fiber.stack = stacks->begin(stack++, thread_entry);
  }
}

// Runs the blocks from `first` on that run side by side
void run_blocks(unsigned first) {
  const unsigned blocks = std::min(state.launch.side_by_side, state.launch.blocks - first);
  state.blocks = std::vector<Block>(blocks);
  state.cluster = Barrier();
  state.loads.clear();
  if (state.launch.watches_order) forget_accesses();
  state.resident = nullptr;
  size_t stack = 0;
  for (unsigned rank = 0; rank < blocks; ++rank) prepare(state.blocks[rank], first + rank, rank, stack);
  scheduler_context = stacks->begin(stack, scheduler_entry);
  emulator_switch(&main_context, scheduler_context);  // until end_launch
  current = nullptr;
  for (Block& block : state.blocks) {
    free_shared(block.shared, state.launch.shared);
    for (Mbarrier* mbarrier : block.mbarriers) delete mbarrier;
  }
  state.blocks.clear();
}

}  // namespace

uint64_t Device::next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

bool Pace::skips_turn(unsigned most_turns) {
  if (!state.random) return false;
  if (turns-- == 0) {
    static const unsigned rests[] = {0, 0, RESTS / 2, RESTS - 2, RESTS};
    rest = rests[state.next_random() % 5];
    turns = most_turns >> state.next_random() % 9;
    lagging = state.chance(8) ? 1u << state.next_random() % 32 : 0;
  }
  return state.next_random() % RESTS < rest;
}

void fail(Place at, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  state.error = text;
  if (current) {
    const Place place = at.file ? at : me().at;
    snprintf(text, sizeof text, "\n  block %u, thread %u, ", current->block.x, current->thread.x);
    state.error += text;
    // A fault has no place of its own here, only that of the synchronisation before: engine.py adds "at FILE:LINE"
    const char* after = state.fault_library.empty() ? "" : "after ";
    if (!place.file) state.error += "before it came to any other";
    else state.error += after + std::string(place.file) + ":" + std::to_string(place.line);
  }
  end_launch();
}

void wait_for(const Wait& wait, Place at) {
  Fiber& fiber = me();
  fiber.at = at;
  if (wait.lets_go_on()) return;
  fiber.wait = &wait;
  Condition& condition = fiber.warp->conditions[fiber.lane()];
  condition.word = wait.word, condition.mask = wait.mask, condition.value = wait.value;
  yield();
  condition = Condition();
  fiber.wait = nullptr;
}

void let_others_go_first(Place at) {
  me().at = at;
  if (state.chance(8)) yield();
}

void pause(bool other_processes, Place at) {
  Fiber& fiber = me();
  fiber.at = at, fiber.polls = true, fiber.polls_others = other_processes;
  yield();
  fiber.polls = false;
}

int run(const Launch& launch, void (*body)(const void*), const void* data) {
  state.launch = launch;
  state.error.clear(), state.fault_library.clear();
  state.random = launch.seed != 0;
  state.random_state = launch.seed * 2654435761u + 88172645463325252ull;
  thread_body = body, thread_data = data;
  host_thread = pthread_self();
  grid = {launch.blocks, 1, 1}, block_size = {launch.threads, 1, 1};
  const size_t fibers = (size_t)launch.side_by_side * launch.threads + 1;
  if (!stacks || stacks->count < fibers) stacks = std::make_unique<Stacks>(fibers);
  const FaultHandler faults;
  for (unsigned first = 0; first < launch.blocks && state.error.empty(); first += launch.side_by_side)
    run_blocks(first);
  if (state.error.empty()) state.error = find_damage();
  if (state.error.empty()) return 0;
  state.error = std::string(launch.kernel) + ": " + state.error;
  return 1;
}

static void note_instruction(const void* instruction) {
  Dl_info library{};
  dladdr(instruction, &library);
  state.fault_library = library.dli_fname ? library.dli_fname : "";
  state.fault_offset = (uint64_t)instruction - (uint64_t)library.dli_fbase;
}

// Called by the signal handler of memory.cpp: a fault of a thread, or of a copy or product that the scheduler does
void fault(const char* what, const void* address, const void* instruction) {
  std::string where;
  if (address)
    where = " " + (stacks->overflown((const char*)address) ? "beyond the end of its stack" : describe_address(address));
  note_instruction(instruction);
  fail(current ? me().at : Place{}, "%s%s", what, where.c_str());
}
bool is_on_a_stack(const void* address) { return stacks->holds((const char*)address); }
void unordered_access(const void* address, bool writes, const Fiber& other, bool other_writes,
                      const void* instruction) {
  note_instruction(instruction);
  const char* shared = (const char*)address;
  const std::string where = shared >= state.launch.statics && shared < state.launch.statics_end
                                ? "byte " + std::to_string(shared - state.launch.statics) + " of static shared memory"
                                : describe_address(address, "").substr(strlen("to "));
  fail(me().at, "a %s %s has no order with the %s by lane %u of this warp after %s:%d", writes ? "write to" : "read of",
       where.c_str(), other_writes ? "write" : "read", other.lane(), other.at.file ? other.at.file : "its start",
       other.at.line);
}
// Whether this thread of the host runs a thread of the device
bool is_running() { return current != nullptr && pthread_equal(host_thread, pthread_self()); }

}  // namespace device

void device::reach(unsigned place) { device::reached[place] = 1; }
// Places of all launches so far
extern "C" const unsigned char* emulator_reached() { return device::reached; }

extern "C" const char* emulator_error() { return device::state.error.c_str(); }
// The library of the instruction of a fault ("": there was none), and its place there
extern "C" const char* emulator_fault(uint64_t* offset) {
  *offset = device::state.fault_offset;
  return device::state.fault_library.c_str();
}
