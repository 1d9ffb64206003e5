// Hopper's products, asynchronous, of a warpgroup.
#pragma once
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Raise or lower the number of registers of each thread of this warpgroup (setmaxnreg).
template <int N>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Lower half of wgmma's shared memory descriptor of rows of 128 bytes, as a TMA box with 128-byte
// swizzle leaves them: groups of eight rows are 1024 bytes apart. Adding 1 moves on by 16 bytes along
// the rows.
__device__ __forceinline__ u32 shared_descriptor(u32 address) {
  return (address & 0x3ffff) >> 4 | 1 << 16;
}
// Upper half: 128-byte swizzle, 1024 bytes between groups of eight rows
#define DESCRIPTOR_HIGH "0x40000040"
// The same memory read as a transposed operand. Boxes of 64 columns are `distance` bytes from each
// other. Adding 128 moves on by 16 rows.
__device__ __forceinline__ u32 transposed_descriptor(u32 address, u32 distance) {
  return (address & 0x3ffff) >> 4 | distance >> 4 << 16;
}
// wgmma.fence: registers and shared memory are ready for the products that follow.
__device__ __forceinline__ void warpgroup_arrive() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All but the last N committed groups of products are done.
template <int N>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// A fence for the compiler, which does not know when wgmma writes the accumulators: it must not move
// their use before this point.
template <int N>
__device__ __forceinline__ void fence_accumulators(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// x (+)= a b' for 64 rows of a and 128 rows of b, 32 bytes of each; `add` 0: x = a b'.
// Lane 4 g + t of warp w holds, for each eight columns j, x[4 j + e]: row 16 w + g + 8 (e / 2),
// column 8 j + 2 t + e % 2.
#define F8(x, i)                                                                                 \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]),      \
      "+f"(x[i + 6]), "+f"(x[i + 7])
#define F64(x) \
  F8(x, 0), F8(x, 8), F8(x, 16), F8(x, 24), F8(x, 32), F8(x, 40), F8(x, 48), F8(x, 56)
#define REGISTERS_64                                                                             \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
  "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,"    \
  "%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_64_TO_127                                                                      \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,"    \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,"    \
  "%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,"      \
  "%126,%127"
#define WGMMA(name, type)                                                                        \
  __device__ __forceinline__ void name(float (&x)[64], u32 a, u32 b, int add) {                  \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %66, 0;\n"                        \
        "mov.b64 a, {%64, " DESCRIPTOR_HIGH "};\nmov.b64 b, {%65, " DESCRIPTOR_HIGH "};\n"       \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" REGISTERS_64 "},"      \
        " a, b, add, 1, 1, 0, 0;\n}"                                                             \
        : F64(x) : "r"(a), "r"(b), "r"(add));                                                    \
  }                                                                                              \
  /* The same for 256 rows of b: x for the first 128, y for the others. */                       \
  __device__ __forceinline__ void name(float (&x)[64], float (&y)[64], u32 a, u32 b, int add) {  \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %130, 0;\n"                       \
        "mov.b64 a, {%128, " DESCRIPTOR_HIGH "};\nmov.b64 b, {%129, " DESCRIPTOR_HIGH "};\n"     \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                             \
        " {" REGISTERS_64 "," REGISTERS_64_TO_127 "}, a, b, add, 1, 1, 0, 0;\n}"                 \
        : F64(x), F64(y) : "r"(a), "r"(b), "r"(add));                                            \
  }
WGMMA(wgmma_bf16, "bf16")
WGMMA(wgmma_fp16, "f16")
#undef WGMMA
#undef REGISTERS_64_TO_127

// x += a b for 64 rows of a, 16 columns of them in registers as two m64 x 8 products leave them, and
// 16 rows of b, whose further 64 columns are found by `transposed_descriptor`.
#define WGMMA_ROWS(name, type)                                                                   \
  __device__ __forceinline__ void name(float (&x)[64], const u32 (&a)[4], u32 b) {               \
    asm volatile(                                                                                \
        "{\n.reg .b64 b;\nmov.b64 b, {%68, " DESCRIPTOR_HIGH "};\n"                                  \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                             \
        " {" REGISTERS_64 "},"                                                                    \
        " {%64,%65,%66,%67}, b, 1, 1, 1, 1;\n}"                                                  \
        : F64(x) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                   \
  }                                                                                              \
  __device__ __forceinline__ void name(float (&x)[32], const u32 (&a)[4], u32 b) {               \
    asm volatile(                                                                                \
        "{\n.reg .b64 b;\nmov.b64 b, {%36, " DESCRIPTOR_HIGH "};\n"                                  \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                              \
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"   \
        "%23,%24,%25,%26,%27,%28,%29,%30,%31},"                                                  \
        " {%32,%33,%34,%35}, b, 1, 1, 1, 1;\n}"                                                  \
        : F8(x, 0), F8(x, 8), F8(x, 16), F8(x, 24)                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                                   \
  }
WGMMA_ROWS(wgmma_rows_bf16, "bf16")
WGMMA_ROWS(wgmma_rows_fp16, "f16")
#undef WGMMA_ROWS
#undef REGISTERS_64
#undef F64
#undef F8

#endif
