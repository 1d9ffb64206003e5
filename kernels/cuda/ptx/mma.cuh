// Tensor cores: matrices from and to shared memory, and products that a warp waits for.
#pragma once

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8 and receives, of
// each, the four bytes at row l / 4, column l % 4.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row))
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// Four 8 x 16-byte matrices the other way: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(void* row, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(shared_address(row)), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
#endif

#define MMA(name, shape)                                                                      \
  __device__ __forceinline__ void name(float& d0, float& d1, float& d2, float& d3,            \
                                       const u32 (&a)[4], u32 b0, u32 b1) {                   \
    asm("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "           \
        "{%0, %1, %2, %3};"                                                                   \
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                      \
  }
#if __CUDA_ARCH__ >= 800
MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
MMA(mma_fp16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#endif
#undef MMA
