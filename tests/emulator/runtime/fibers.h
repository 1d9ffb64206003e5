// Fibers: threads of execution, each with a stack, that run in turns in one thread of the host.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

namespace device {

// Leaves a fiber and resumes another one: pushes the registers that a function has to keep on the stack, stores the
// stack pointer in *from, and goes on at the stack pointer `to`.
extern "C" void emulator_switch(void** from, void* to) __attribute__((visibility("hidden")));

#if defined(__x86_64__)
asm(R"(
  .text
  .globl emulator_switch
  .hidden emulator_switch
  .type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
  .size emulator_switch, .-emulator_switch
)");
constexpr int SAVED = 6;  // registers on the stack, below the return address
inline void** first_frame(void** top, void (*entry)()) {
  *--top = nullptr;  // as if `entry` had been called: 16 n + 8
  *--top = (void*)entry;
  for (int i = 0; i < SAVED; ++i) *--top = nullptr;
  return top;
}
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl emulator_switch
  .hidden emulator_switch
  .type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size emulator_switch, .-emulator_switch
)");
inline void** first_frame(void** top, void (*entry)()) {
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = nullptr;
  top[11] = (void*)entry;  // x30, where `ret` goes
  return top;
}
#else
#error "fibers: expected x86-64 or aarch64"
#endif

// The stacks of all fibers of a launch. Later launches with at most as many fibers use them again. Below each stack lies
// a page that cannot be used.
struct Stacks {
  static constexpr size_t SIZE = 256 << 10;
  static constexpr size_t SHIFT = 17 * 64, SHIFTS = 60;  // tops of stacks lie in different sets of the caches
  char* memory = nullptr;
  size_t count, bytes;

  explicit Stacks(size_t n) : count(n), bytes(n * SIZE) {
    memory = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    for (size_t i = 0; i < n; ++i) mprotect(memory + i * SIZE, (size_t)sysconf(_SC_PAGESIZE), PROT_NONE);
  }
  ~Stacks() { munmap(memory, bytes); }
  Stacks(const Stacks&) = delete;
  // The stack pointer with which emulator_switch begins `entry` on stack i
  void* begin(size_t i, void (*entry)()) const {
    return first_frame((void**)(memory + (i + 1) * SIZE - i % SHIFTS * SHIFT), entry);
  }
  bool holds(const char* at) const { return at >= memory && at < memory + bytes; }
  bool overflown(const char* at) const {
    return holds(at) && (size_t)(at - memory) % SIZE < (size_t)sysconf(_SC_PAGESIZE);
  }
};

}  // namespace device
