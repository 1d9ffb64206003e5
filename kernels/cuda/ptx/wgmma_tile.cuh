// Hopper's matrix products of 64 rows and KEY_TILE columns: 64, 104, 128, 152 or 176. wgmma.cuh has those of 128 and 256.
#pragma once
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && defined(KEY_TILE)

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
// Registers of eight columns, after those of a, b and add
#define EIGHT_0 "%3,%4,%5,%6"
#define EIGHT_1 ",%7,%8,%9,%10"
#define EIGHT_2 ",%11,%12,%13,%14"
#define EIGHT_3 ",%15,%16,%17,%18"
#define EIGHT_4 ",%19,%20,%21,%22"
#define EIGHT_5 ",%23,%24,%25,%26"
#define EIGHT_6 ",%27,%28,%29,%30"
#define EIGHT_7 ",%31,%32,%33,%34"
#define EIGHT_8 ",%35,%36,%37,%38"
#define EIGHT_9 ",%39,%40,%41,%42"
#define EIGHT_10 ",%43,%44,%45,%46"
#define EIGHT_11 ",%47,%48,%49,%50"
#define EIGHT_12 ",%51,%52,%53,%54"
#define EIGHT_13 ",%55,%56,%57,%58"
#define EIGHT_14 ",%59,%60,%61,%62"
#define EIGHT_15 ",%63,%64,%65,%66"
#define EIGHT_16 ",%67,%68,%69,%70"
#define EIGHT_17 ",%71,%72,%73,%74"
#define EIGHT_18 ",%75,%76,%77,%78"
#define EIGHT_19 ",%79,%80,%81,%82"
#define EIGHT_20 ",%83,%84,%85,%86"
#define EIGHT_21 ",%87,%88,%89,%90"
#define REGISTERS_8 EIGHT_0 EIGHT_1 EIGHT_2 EIGHT_3 EIGHT_4 EIGHT_5 EIGHT_6 EIGHT_7
#define REGISTERS_13 REGISTERS_8 EIGHT_8 EIGHT_9 EIGHT_10 EIGHT_11 EIGHT_12
#define REGISTERS_16 REGISTERS_13 EIGHT_13 EIGHT_14 EIGHT_15
#define REGISTERS_19 REGISTERS_16 EIGHT_16 EIGHT_17 EIGHT_18
#define REGISTERS_22 REGISTERS_19 EIGHT_19 EIGHT_20 EIGHT_21
#define X4(i) "+f"(x[4 * i]), "+f"(x[4 * i + 1]), "+f"(x[4 * i + 2]), "+f"(x[4 * i + 3])
#define OPERANDS_8 X4(0), X4(1), X4(2), X4(3), X4(4), X4(5), X4(6), X4(7)
#define OPERANDS_13 OPERANDS_8, X4(8), X4(9), X4(10), X4(11), X4(12)
#define OPERANDS_16 OPERANDS_13, X4(13), X4(14), X4(15)
#define OPERANDS_19 OPERANDS_16, X4(16), X4(17), X4(18)
#define OPERANDS_22 OPERANDS_19, X4(19), X4(20), X4(21)
#if KEY_TILE == 64
#define REGISTERS REGISTERS_8
#define OPERANDS OPERANDS_8
#elif KEY_TILE == 104
#define REGISTERS REGISTERS_13
#define OPERANDS OPERANDS_13
#elif KEY_TILE == 128
#define REGISTERS REGISTERS_16
#define OPERANDS OPERANDS_16
#elif KEY_TILE == 152
#define REGISTERS REGISTERS_19
#define OPERANDS OPERANDS_19
#elif KEY_TILE == 176
#define REGISTERS REGISTERS_22
#define OPERANDS OPERANDS_22
#endif

// x += a b' (`add` 1) or x = a b' (`add` 0), for 64 rows of a and KEY_TILE rows of b: as wgmma_bf16 of wgmma.cuh.
#define WGMMA_TILE(name, type)                                                                   \
  __device__ __forceinline__ void name(float (&x)[KEY_TILE / 2], u32 a, u32 b, int add) {            \
    asm volatile(                                                                                \
        "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %2, 0;\n"                         \
        "mov.b64 a, {%0, " DESCRIPTOR_HIGH "};\nmov.b64 b, {%1, " DESCRIPTOR_HIGH "};\n"         \
        "wgmma.mma_async.sync.aligned.m64n" TEXT(KEY_TILE) "k16.f32." type "." type " {" REGISTERS   \
        "}, a, b, add, 1, 1, 0, 0;\n}"                                                           \
        : "+r"(a), "+r"(b), "+r"(add), OPERANDS);                                                \
  }
WGMMA_TILE(wgmma_tile_bf16, "bf16")
WGMMA_TILE(wgmma_tile_fp16, "f16")
#undef WGMMA_TILE
#undef TEXT
#undef TEXT_

#endif
