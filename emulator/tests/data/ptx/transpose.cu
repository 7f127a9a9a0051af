// out = x^T by tiles of 32 x 32, which a bulk copy brings row by row.
#include <cuda/barrier>
#include <cuda/std/utility>

using barrier = cuda::barrier<cuda::thread_scope_block>;

extern "C" __global__ void transpose(const float* x, float* out, int rows, int columns) {
  __shared__ alignas(128) float tile[32][32];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ barrier full;
  int row = blockIdx.y * 32, column = blockIdx.x * 32;
  if (threadIdx.x == 0) {
    init(&full, blockDim.x);
    cuda::device::experimental::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  barrier::arrival_token token;
  if (threadIdx.x == 0) {
    for (int n = 0; n < 32; ++n)
      cuda::device::experimental::cp_async_bulk_global_to_shared(tile[n], x + (row + n) * columns + column, 128, full);
    token = cuda::device::barrier_arrive_tx(full, 1, sizeof(tile));
  } else {
    token = full.arrive();
  }
  full.wait(cuda::std::move(token));
  for (int n = threadIdx.x / 32; n < 32; n += blockDim.x / 32)
    out[(column + n) * rows + row + threadIdx.x % 32] = tile[threadIdx.x % 32][n];
}
