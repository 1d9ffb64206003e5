// Checks the order of a warp's accesses to memory. Kernels compiled with -fsanitize=thread call these functions at
// each access; the compiler's own TSan library is not linked. If two lanes of a warp use the same bytes, and one of
// them writes, they need a synchronisation in between. A shuffle or a vote brings lanes together, but does not order
// memory.
//
// Each lane counts its releases (arrivals at a barrier), and knows the last release that it has seen of each other
// lane. Access B of a lane is ordered after access A of another lane if B's lane has seen a release that A's lane made
// after A.
#include <memory>
#include <unordered_map>

#include "state.h"

namespace device {

namespace {

constexpr uintptr_t GRANULE = 2;  // bytes: the smallest number that kernels store
constexpr uintptr_t PAGE = 4096;

// An access by a lane, and the number of releases that the lane had made before
struct Access {
  const Fiber* fiber = nullptr;
  uint32_t releases = 0;
};
struct Granule {
  Access write, read;  // the last ones
};
struct Page {
  Granule granules[PAGE / GRANULE];
};
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t last_number;
Page* last_page;

Granule& granule_at(uintptr_t address) {
  const uintptr_t number = address / PAGE;
  if (!last_page || number != last_number) {
    std::unique_ptr<Page>& page = pages[number];
    if (!page) page = std::make_unique<Page>();
    last_number = number, last_page = page.get();
  }
  return last_page->granules[address % PAGE / GRANULE];
}

// Whether this lane's access has no order with an earlier access of another lane of its warp
bool is_unordered(const Access& earlier) {
  const Fiber& fiber = me();
  return earlier.fiber && earlier.fiber != &fiber && earlier.fiber->warp == fiber.warp &&
         fiber.seen.releases[earlier.fiber->lane()] <= earlier.releases;
}

void check(const void* address, size_t bytes, bool writes, const void* instruction) {
  if (!current || is_on_a_stack(address)) return;
  const uintptr_t begin = (uintptr_t)address, end = begin + bytes;
  const Access access{&me(), me().seen.releases[current->lane()]};
  for (uintptr_t at = begin; at < end; at += GRANULE) {
    Granule& granule = granule_at(at);
    const bool after_write = is_unordered(granule.write);
    if (after_write || (writes && is_unordered(granule.read)))
      unordered_access(address, writes, *(after_write ? granule.write : granule.read).fiber, after_write, instruction);
    (writes ? granule.write : granule.read) = access;
  }
}

}  // namespace

void forget_accesses() {
  pages.clear();
  last_page = nullptr;
}

void Seen::join(const Seen& other) {
  for (int lane = 0; lane < 32; ++lane) releases[lane] = std::max(releases[lane], other.releases[lane]);
}

void note_release(Meeting& meeting) {
  if (!state.launch.watches_order) return;
  Fiber& fiber = me();
  ++fiber.seen.releases[fiber.lane()];
  meeting.released[fiber.warp].join(fiber.seen);
}

void note_acquire(const Meeting& meeting) {
  if (!state.launch.watches_order) return;
  const auto released = meeting.released.find(me().warp);
  if (released != meeting.released.end()) me().seen.join(released->second);
}

}  // namespace device

#define HOOKS(bytes)                                                                                    \
  extern "C" void __tsan_read##bytes(void* p) { device::check(p, bytes, false, __builtin_return_address(0)); } \
  extern "C" void __tsan_write##bytes(void* p) { device::check(p, bytes, true, __builtin_return_address(0)); } \
  extern "C" void __tsan_unaligned_read##bytes(void* p) {                                               \
    device::check(p, bytes, false, __builtin_return_address(0));                                        \
  }                                                                                                     \
  extern "C" void __tsan_unaligned_write##bytes(void* p) {                                              \
    device::check(p, bytes, true, __builtin_return_address(0));                                         \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t n) { device::check(p, n, false, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void* p, size_t n) { device::check(p, n, true, __builtin_return_address(0)); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
// Atomic operations are ordered by themselves.
extern "C" uint32_t __tsan_atomic32_load(const uint32_t* p, int) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
extern "C" void __tsan_atomic32_store(uint32_t* p, uint32_t x, int) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
extern "C" uint32_t __tsan_atomic32_fetch_add(uint32_t* p, uint32_t x, int) {
  return __atomic_fetch_add(p, x, __ATOMIC_RELEASE);
}
extern "C" void __tsan_atomic_thread_fence(int) { __sync_synchronize(); }
