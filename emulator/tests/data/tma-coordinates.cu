// Does a tiled TMA copy that begins at this coordinate run? One copy of a box of `inner` x 8 elements at (c0, 3).
// The tensor has 64 rows of 1024 bytes; byte i of it is i % 251.
// Arguments: bytes of an element (1, 2, 4), CUtensorMapSwizzle, inner, c0, 0 for a load or 1 for a store.
// nvcc -arch=sm_90a -o tma-coordinates tma-coordinates.cu -lcuda
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

__global__ void load(const __grid_constant__ CUtensorMap map, int c0, int c1, int bytes, int store) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ __align__(8) uint64_t bar;
  uint32_t b = __cvta_generic_to_shared(&bar), d = __cvta_generic_to_shared(smem);
  if (store) {
    for (int i = threadIdx.x; i < bytes; i += 32) smem[i] = 7;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x == 0) {
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                   :: "l"(&map), "r"(d), "r"(c0), "r"(c1) : "memory");
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
    return;
  }
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(b) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(b), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];"
                 :: "r"(d), "l"(&map), "r"(b), "r"(c0), "r"(c1) : "memory");
    int done = 0;
    long n = 0;
    while (!done && n++ < 1000000)
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.b32 %0, 1, 0, p;}"
                   : "=r"(done) : "r"(b) : "memory");
    if (!done) printf("no end ");
    printf("first byte %d ", smem[0]);
  }
}

int main(int argc, char** v) {
  int size = atoi(v[1]), swz = atoi(v[2]), inner = atoi(v[3]), c0 = atoi(v[4]), store = atoi(v[5]);
  cuInit(0);
  CUdevice dev;
  CUcontext ctx;
  cuDeviceGet(&dev, 0);
  cuDevicePrimaryCtxRetain(&ctx, dev);
  cuCtxSetCurrent(ctx);
  uint8_t* p;
  cudaMalloc(&p, 1 << 20);
  uint8_t* h = (uint8_t*)malloc(1 << 20);
  for (int i = 0; i < 1 << 20; i++) h[i] = i % 251;
  cudaMemcpy(p, h, 1 << 20, cudaMemcpyHostToDevice);
  CUtensorMap m;
  cuuint64_t dims[2] = {(cuuint64_t)(1024 / size), 64}, str[1] = {1024};
  cuuint32_t box[2] = {(cuuint32_t)inner, 8}, es[2] = {1, 1};
  CUtensorMapDataType t = size == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                          : size == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  CUresult r = cuTensorMapEncodeTiled(&m, t, 2, p, dims, str, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      (CUtensorMapSwizzle)swz, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r) {
    printf("encode %d\n", r);
    return 0;
  }
  load<<<1, 32, 16384>>>(m, c0, 3, inner * size * 8, store);
  cudaError_t e = cudaDeviceSynchronize();
  printf("size %d swizzle %d box %d coord %d (%d B) %s: %s\n", size, swz, inner, c0, c0 * size,
         store ? "store" : "load", cudaGetErrorString(e));
}
