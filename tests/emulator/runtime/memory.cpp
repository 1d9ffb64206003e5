// Arrays that end at a page that cannot be used, and the report of a thread that uses such a page, such as
//
//     lse: an access 0 bytes beyond the end of array of 7200 bytes
//       block 3, thread 70, after tiled/pipeline.cuh:120, at tiled/lse.cu:95
//
// `after` names the last synchronisation that the thread came to, and `at` the line of the access. The length of an
// array may be no multiple of ALIGNMENT. Then up to 15 bytes are between the array and the page: the end of the launch
// finds writes to these bytes (`find_damage`), and reads of them return NaN.
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <vector>

#include "state.h"

namespace device {

void fault(const char* what, const void* address, const void* instruction);  // schedule.cpp
bool is_running();                                                           // schedule.cpp

namespace {

constexpr char UNUSED = (char)0xff;  // all bytes of memory that no thread has written: NaN as floating point numbers
constexpr size_t ALIGNMENT = 16;     // bytes, which kernels and TMA need of arrays that are not the caller's

size_t page_bytes() {
  static const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
  return bytes;
}
size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

bool is_unused(const char* p, const char* end) {
  if (p == end) return true;
  return *p == UNUSED && memcmp(p, p + 1, (size_t)(end - p) - 1) == 0;
}

struct Array {
  char *start, *pages;   // the first byte of the array, and of its pages
  size_t bytes, mapped;  // bytes of the array, and of its pages (without the unusable pages on both sides)
  bool is_damaged() const {
    return !is_unused(pages, start) || !is_unused(start + bytes, pages + mapped);
  }
};
std::map<const char*, Array> arrays;  // by their start
std::mutex arrays_lock;

// Maps pages between two pages that cannot be used. The array begins at a multiple of `alignment`, and ends less than
// `alignment` bytes before the second unusable page.
Array map_array(size_t bytes, size_t alignment) {
  const size_t inside = round_up(bytes ? bytes : 1, alignment), mapped = round_up(inside, page_bytes());
  char* pages = (char*)mmap(nullptr, mapped + 2 * page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return {};
  mprotect(pages, page_bytes(), PROT_NONE);
  pages += page_bytes();
  mprotect(pages + mapped, page_bytes(), PROT_NONE);
  memset(pages, UNUSED, mapped);
  return {pages + mapped - inside, pages, bytes, mapped};
}
void unmap(const Array& array) { munmap(array.pages - page_bytes(), array.mapped + 2 * page_bytes()); }

std::map<const char*, Array> shared_memories;
std::vector<Array> spare;  // shared memories of blocks that have ended

// --- faults ---------------------------------------------------------------------------------------------

const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
constexpr int COUNT = sizeof SIGNALS / sizeof *SIGNALS;
struct sigaction earlier_actions[COUNT];  // of the process, before a launch
stack_t earlier_stack;
char handler_stack[64 << 10];

void handle(int number, siginfo_t* info, void* context) {
  if (is_running()) {  // `fault` ends the launch and does not return; SA_NODEFER leaves the signal enabled
#if defined(__x86_64__)
    const void* instruction = (void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#else
    const void* instruction = (void*)((ucontext_t*)context)->uc_mcontext.pc;
#endif
    if (number == SIGSEGV || number == SIGBUS) fault("an access", info->si_addr, instruction);
    fault(number == SIGFPE ? "an integer is divided by zero" : "a trap", nullptr, instruction);
  }
  for (int i = 0; i < COUNT; ++i)  // the fault happens again, and the earlier handler gets it
    if (SIGNALS[i] == number) sigaction(number, &earlier_actions[i], nullptr);
}

}  // namespace

FaultHandler::FaultHandler() {
  stack_t stack{};
  stack.ss_sp = handler_stack, stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &earlier_stack);
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &action, &earlier_actions[i]);
}
FaultHandler::~FaultHandler() {
  for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &earlier_actions[i], nullptr);
  sigaltstack(&earlier_stack, nullptr);
}

// Describes an address by the nearest array
std::string describe_address(const void* address, const char* inside) {
  const char* at = (const char*)address;
  char text[200];
  const std::unique_lock<std::mutex> guard(arrays_lock, std::try_to_lock);  // fails if the fault came under the lock
  const Array* nearest = nullptr;
  size_t least = 1 << 20;
  const char* what = "array";
  for (const auto* all : {&arrays, &shared_memories})
    for (const auto& [start, array] : *all) {
      const size_t away = at < start ? (size_t)(start - at) : at >= start + array.bytes ? (size_t)(at - start) - array.bytes : 0;
      if (away < least) least = away, nearest = &array, what = all == &arrays ? "array" : "shared memory";
    }
  if (!nearest) {
    snprintf(text, sizeof text, "at %p, which is near no array", address);
  } else if (at < nearest->start) {
    snprintf(text, sizeof text, "%zu bytes before %s of %zu bytes", least, what, nearest->bytes);
  } else if (at < nearest->start + nearest->bytes) {
    snprintf(text, sizeof text, "to byte %zu of %s of %zu bytes%s", (size_t)(at - nearest->start), what, nearest->bytes,
             inside);
  } else {
    snprintf(text, sizeof text, "%zu bytes beyond the end of %s of %zu bytes", least, what, nearest->bytes);
  }
  return text;
}

// Reports writes beside an array that have not hit an unusable page, at the end of a launch. The bytes are repaired, so
// that the next launch is not blamed.
std::string find_damage() {
  const std::lock_guard<std::mutex> guard(arrays_lock);
  for (const auto& [start, array] : arrays)
    if (array.is_damaged()) {
      for (char* p = array.pages; p < array.pages + array.mapped; ++p)
        if (p < start || p >= start + array.bytes) *p = UNUSED;
      return "a thread has written just before or beyond an array of " + std::to_string(array.bytes) + " bytes";
    }
  return "";
}

// The dynamic shared memory of a block: `new_shared` before it begins, `end_shared` when it ends, so that a later
// access is a fault, and `free_shared` when all blocks beside it have ended
char* new_shared(size_t bytes) {
  Array array{};
  while (!spare.empty() && !array.pages) {
    array = spare.back();
    spare.pop_back();
    if (array.bytes != bytes) unmap(array), array = {};
  }
  if (array.pages) {
    mprotect(array.pages, array.mapped, PROT_READ | PROT_WRITE);
    memset(array.pages, UNUSED, array.mapped);
  } else {
    array = map_array(bytes, 1024);
  }
  if (!array.pages) fail({}, "no memory is left for %zu bytes of shared memory", bytes);
  shared_memories[array.start] = array;
  return array.start;
}
void end_shared(char* memory, size_t) {
  const Array& array = shared_memories.at(memory);
  if (array.is_damaged()) fail(me().at, "a thread of this block has written just before or beyond its shared memory");
  mprotect(array.pages, array.mapped, PROT_NONE);
}
void free_shared(char* memory, size_t) {
  spare.push_back(shared_memories.at(memory));
  shared_memories.erase(memory);
}

}  // namespace device

using namespace device;

// --- what the compiler checks (-fsanitize=bounds,alignment) ---------------------------------------------

namespace {
struct SourceLine {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, details;
  char name[1];
};
struct OutOfBounds {
  SourceLine at;
  const Type *array, *index;
};
struct TypeMismatch {
  SourceLine at;
  const Type* type;
  unsigned char log_alignment, kind;
};
}  // namespace
extern "C" void __ubsan_handle_out_of_bounds_abort(const OutOfBounds* data, uintptr_t index) {
  fail({data->at.file, (int)data->at.line}, "index %ld of an array of type %s", (long)index, data->array->name);
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* data, uintptr_t address) {
  fail({data->at.file, (int)data->at.line}, "an access to %s at %#lx: expected a multiple of %d bytes", data->type->name,
       (unsigned long)address, 1 << data->log_alignment);
}

// An array of so many bytes; null: no memory is left.
extern "C" void* emulator_allocate(size_t bytes, size_t alignment) {
  const std::lock_guard<std::mutex> guard(arrays_lock);
  const Array array = map_array(bytes, alignment ? alignment : ALIGNMENT);
  if (!array.pages) return nullptr;
  arrays[array.start] = array;
  return array.start;
}
extern "C" void emulator_free(void* start) {
  const std::lock_guard<std::mutex> guard(arrays_lock);
  const auto found = arrays.find((const char*)start);
  if (found == arrays.end()) return;
  unmap(found->second);
  arrays.erase(found);
}
