// Instructions for which the lanes of a warp come together.
#include "state.h"

namespace device {

void together(unsigned mask, Operation operation, void* mine, Place at) {
  let_others_go_first(at);
  const unsigned lane = current->lane();
  if (!(mask >> lane & 1)) fail(at, "lane %u is not in its mask %#x", lane, mask);
  // One meeting for the full mask, and one for each lowest lane: so lanes of disjoint masks meet separately
  Lanes& lanes = my_warp().meetings[mask == ~0u ? 0 : 1 + __builtin_ctz(mask)];
  if (lanes.arrived.empty()) {
    lanes.mask = mask, lanes.operation = operation, lanes.at = at;
    lanes.expected = __builtin_popcount(mask);
  } else if (lanes.mask != mask || lanes.operation != operation) {
    fail(at, "the lanes of a warp come together here and at %s:%d, for different instructions", lanes.at.file,
         lanes.at.line);
  }
  lanes.all[lane] = mine;
  lanes.arrived.push_back(&me());
  if (!operation) note_release(lanes);  // __syncwarp; shuffles, votes and products order no accesses
  if ((int)lanes.arrived.size() < lanes.expected) {
    wait_for(until_next_phase(lanes, "the warp"), at);
    if (!operation) note_acquire(lanes);
    return;
  }
  if (operation) operation(lanes.all, mask, at);
  if (!operation) note_acquire(lanes);
  lanes.arrived.clear();
  ++lanes.generation;
}

namespace {

struct Shuffled {
  uint64_t x;
  int from;
};
void shuffle_all(void** all, unsigned mask, Place at) {
  uint64_t x[32];
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) x[lane] = ((Shuffled*)all[lane])->x;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Shuffled& s = *(Shuffled*)all[lane];
    if (!(mask >> s.from & 1)) fail(at, "a shuffle from lane %d, which is not in the mask %#x", s.from, mask);
    s.x = x[s.from];
  }
}

struct Ballot {
  bool vote;
  unsigned votes;
};
void count_votes(void** all, unsigned mask, Place) {
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) votes |= (unsigned)((Ballot*)all[lane])->vote << lane;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) ((Ballot*)all[lane])->votes = votes;
}

}  // namespace

uint64_t shuffle(unsigned mask, uint64_t x, int from, Place at) {
  Shuffled mine{x, from};
  together(mask, shuffle_all, &mine, at);
  return mine.x;
}

unsigned ballot(unsigned mask, bool vote, Place at) {
  Ballot mine{vote, 0};
  together(mask, count_votes, &mine, at);
  return mine.votes;
}

}  // namespace device
