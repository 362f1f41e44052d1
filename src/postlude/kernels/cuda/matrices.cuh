// ldmatrix: 8×8 matrices of 16-bit numbers from shared memory as fragments of a product. Needs operands.cuh.
//
// Lane 8m + r gives the address of row r of matrix m: 16 bytes, aligned. Lane (g, t) receives numbers 2t and 2t + 1 of
// row g of each matrix m, or of column g if transposed.

#ifndef POSTLUDE_HOST
__device__ __forceinline__ void load_matrices(u32 (&d)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&d)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}
#endif
