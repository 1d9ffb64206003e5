// Barriers of a block, of a cluster, and mbarriers.
#include "state.h"

namespace device {

namespace {

void complete_phase(Meeting& meeting) {
  meeting.arrived.clear();
  meeting.expected = 0;
  ++meeting.generation;
}

void arrive_at_meeting(Meeting& meeting, int expected) {
  meeting.arrived.push_back(&me());
  note_release(meeting);
  meeting.expected = expected;
  if ((int)meeting.arrived.size() >= expected) complete_phase(meeting);
}

int threads_alive_in_cluster() {
  int alive = 0;
  for (const Block& block : state.blocks) alive += block.alive;
  return alive;
}

void complete_votes(Barrier& barrier) {
  barrier.result = barrier.votes != 0;
  barrier.votes = 0;
}

// A named barrier, after the checks of this thread's arrival
Barrier& check_arrival(int barrier, int threads, Place at) {
  if (barrier < 0 || barrier > 15) fail(at, "named barrier %d: expected 0 to 15", barrier);
  Barrier& b = my_block().named_barriers[barrier];
  if (!b.arrived.empty() && b.expected != threads)
    fail(at, "named barrier %d: %d threads, where others of this phase say %d", barrier, threads, b.expected);
  uint32_t& arrival = me().arrivals[barrier];
  if (arrival == b.generation + 1) fail(at, "named barrier %d: this thread has arrived already in this phase", barrier);
  arrival = b.generation + 1;
  return b;
}

int64_t offset_of(const void* shared) { return (const char*)shared - current->shared; }

Mbarrier& get_mbarrier(Block& block, int64_t offset, Place at) {
  if (block.ended) fail(at, "an mbarrier of block %u, which has ended", block.index.x);
  Mbarrier* mbarrier = find_mbarrier(block, offset);
  if (!mbarrier) fail(at, "no mbarrier has been initialised at shared memory + %ld", (long)offset);
  const uint64_t* word = (const uint64_t*)(block.shared + offset);
  if (*word != (uint64_t)mbarrier) fail(at, "the mbarrier at shared memory + %ld has been overwritten", (long)offset);
  return *mbarrier;
}

void complete_if_all_have_arrived(Mbarrier& mbarrier) {
  if ((int)mbarrier.arrived.size() != mbarrier.expected || mbarrier.bytes != 0) return;
  mbarrier.arrived.clear();
  ++mbarrier.generation;
}

void arrive_in_block(Block& block, int64_t offset, unsigned bytes, Place at) {
  Mbarrier& mbarrier = get_mbarrier(block, offset, at);
  if (&block != &my_block() && !mbarrier.fenced)
    fail(at, "an mbarrier of another block is used without a fence after its initialisation");
  if ((int)mbarrier.arrived.size() == mbarrier.expected)
    fail(at, "more than %d arrivals at the mbarrier at shared memory + %ld in one phase", mbarrier.expected,
         (long)offset);
  mbarrier.arrived.push_back(&me());
  note_release(mbarrier);
  mbarrier.bytes += bytes;
  complete_if_all_have_arrived(mbarrier);
}

}  // namespace

int sync_block(int vote, Place at) {
  let_others_go_first(at);
  Barrier& barrier = check_arrival(0, my_block().alive, at);
  barrier.votes |= vote;
  if ((int)barrier.arrived.size() + 1 == my_block().alive) complete_votes(barrier);
  const Wait wait = until_next_phase(barrier, "__syncthreads");  // made before the arrival, which may complete the phase
  arrive_at_meeting(barrier, my_block().alive);
  wait_for(wait, at);
  note_acquire(barrier);
  return barrier.result;
}

void sync_named(int barrier, int threads, Place at) {
  let_others_go_first(at);
  Barrier& b = check_arrival(barrier, threads, at);
  const Wait wait = until_next_phase(b, "a named barrier");
  arrive_at_meeting(b, threads);
  wait_for(wait, at);
  note_acquire(b);
}

void arrive_named(int barrier, int threads, Place at) {
  let_others_go_first(at);
  arrive_at_meeting(check_arrival(barrier, threads, at), threads);
}

void sync_cluster(Place at) {
  let_others_go_first(at);
  const Wait wait = until_next_phase(state.cluster, "the cluster");
  arrive_at_meeting(state.cluster, threads_alive_in_cluster());
  wait_for(wait, at);
  note_acquire(state.cluster);
}

// Lets the barriers of a block and of a cluster no longer wait for a thread that ends. It is called while the block's
// `alive` still counts the thread. Only a phase in which others have arrived already expects the thread; later phases
// expect `alive` threads.
void thread_ended(Fiber& fiber) {
  Barrier& block = fiber.owner->named_barriers[0];
  const int left = fiber.owner->alive - 1;
  if (!block.arrived.empty() && block.expected == fiber.owner->alive) {
    block.expected = left;
    if ((int)block.arrived.size() == left) complete_votes(block), complete_phase(block);
  }
  Barrier& cluster = state.cluster;
  if (!cluster.arrived.empty()) {
    cluster.expected = threads_alive_in_cluster() - 1;
    if ((int)cluster.arrived.size() == cluster.expected) complete_phase(cluster);
  }
}

// --- mbarriers ------------------------------------------------------------------------------------------

Mbarrier* find_mbarrier(Block& block, int64_t offset) {
  return offset >= 0 && offset % 8 == 0 && (size_t)offset + 8 <= state.launch.shared
             ? block.mbarriers[(size_t)offset / 8] : nullptr;
}

// A TMA load that has arrived calls it (copies.cpp).
void complete_bytes(Mbarrier& mbarrier, int64_t bytes) {
  mbarrier.bytes -= bytes;
  complete_if_all_have_arrived(mbarrier);
}

void init(uint64_t& word, unsigned arrivals, Place at) {
  let_others_go_first(at);
  const int64_t offset = offset_of(&word);
  shared_range(my_block(), offset, 8, at);
  if (offset % 8) fail(at, "an mbarrier at shared memory + %ld: expected a multiple of 8", (long)offset);
  Mbarrier*& mbarrier = my_block().mbarriers[(size_t)offset / 8];
  delete mbarrier;
  mbarrier = new Mbarrier;
  mbarrier->expected = (int)arrivals, mbarrier->offset = (long)offset, mbarrier->initialised = at;
  word = (uint64_t)mbarrier;
  me().unfenced.push_back(mbarrier);
}

void fence_inits(Place at) {
  let_others_go_first(at);
  for (Mbarrier* mbarrier : me().unfenced) mbarrier->fenced = true;
  me().unfenced.clear();
}

void wait(uint64_t& word, unsigned parity, Place at) {
  let_others_go_first(at);
  Mbarrier& mbarrier = get_mbarrier(my_block(), offset_of(&word), at);
  // the phase of this parity is complete when the lowest bit of the generation is no longer the parity
  wait_for({{&mbarrier.generation, 1, parity & 1}, &mbarrier, "an mbarrier"}, at);
  note_acquire(mbarrier);
}

void arrive(uint64_t& word, unsigned bytes, Place at) {
  let_others_go_first(at);
  arrive_in_block(my_block(), offset_of(&word), bytes, at);
}

void arrive_at(uint64_t& word, unsigned block, Place at) {
  let_others_go_first(at);
  if (block >= state.blocks.size()) fail(at, "block %u of a cluster of %zu", block, state.blocks.size());
  arrive_in_block(state.blocks[block], offset_of(&word), 0, at);
}

// --- reports --------------------------------------------------------------------------------------------

std::string threads_of(const std::vector<const Fiber*>& fibers) {
  std::string text = fibers.size() == 1 ? "thread" : "threads";
  for (size_t i = 0, ranges = 0; i < fibers.size(); ++ranges) {
    size_t j = i + 1;
    while (j < fibers.size() && fibers[j]->thread.x == fibers[j - 1]->thread.x + 1) ++j;
    if (ranges == 12) return text + " ...";
    text += (ranges ? ", " : " ") + std::to_string(fibers[i]->thread.x);
    if (j - i > 1) text += "-" + std::to_string(fibers[j - 1]->thread.x);
    i = j;
  }
  return text;
}

std::string describe(const Wait& wait, Place at) {
  const std::string line = std::string(at.file ? at.file : "?") + ":" + std::to_string(at.line);
  if (!wait.meeting) return "can go on from " + line;
  std::string text = std::string(wait.what) + " at " + line;
  const Meeting* meeting = wait.meeting;
  if (const std::string what = wait.what; what == "an mbarrier") {
    const Mbarrier& mbarrier = *(const Mbarrier*)meeting;
    text += " (shared memory + " + std::to_string(mbarrier.offset) + ", initialised at " +
            mbarrier.initialised.file + ":" + std::to_string(mbarrier.initialised.line) + ", phase " +
            std::to_string(mbarrier.generation) + ", waits for parity " + std::to_string(wait.value) + ", " +
            std::to_string(mbarrier.bytes) + " bytes to come)";
  }
  text += ", " + std::to_string(meeting->arrived.size()) + " of " + std::to_string(meeting->expected) + " arrived";
  const std::vector<const Fiber*> arrived(meeting->arrived.begin(), meeting->arrived.end());
  return arrived.empty() ? text : text + ": " + threads_of(arrived);
}

}  // namespace device
