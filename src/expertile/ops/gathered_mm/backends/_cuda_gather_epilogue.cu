// What the epilogue warps of the `cuda_gather` kernel make of a consumer's products, its part of the tile.

constexpr int HEIGHT = 64 / FINISHERS;  // rows of a part for an epilogue warp

struct Outputs {
  char *out, *pre, *dpre;  // out: of MM; act; act_w
  const float* weights;
  const int* slots;
  float* sums;
  int rows, inner;  // R; columns of a result of MM, or I
};

// Eight products of a row of a part, from column 8 * chunk on.
__device__ __forceinline__ uint4 products_of(u32 part, int row, int chunk) {
  return load_shared_16(part + chunk / 8 * BLOCK_BYTES + row * 128 + ((chunk % 8 ^ row % 8) << 4));
}

__device__ __forceinline__ int finisher() { return threadIdx.x / LANES % FINISHERS; }

#if PRODUCT == MM
__device__ __forceinline__ void finish(const Outputs& o, const Tile& tile, u32 part, int first, int left, u32 staged,
                                       u32 parity) {
  const int lane = threadIdx.x % LANES, c = tile.col + lane * 8, top = finisher() * HEIGHT;
  char* to = o.out + ((long long)first * o.inner + c) * 2;
  barrier_wait(staged, parity);
#pragma unroll 4
  for (int r = 0; r < HEIGHT; r++)
    if (r < left && c < o.inner) store_16(to + (long long)r * o.inner * 2, products_of(part, top + r, lane));
}
#elif PRODUCT == GATED
__device__ __forceinline__ void finish(const Outputs& o, const Tile& tile, u32 part, int first, int left, u32 staged,
                                       u32 parity) {
  const int lane = threadIdx.x % LANES, chunk = lane % 16, c = tile.col + chunk * 8, top = finisher() * HEIGHT;
  barrier_wait(staged, parity);
#pragma unroll 2
  for (int i = 0; i < HEIGHT / 2; i++) {
    const int r = 2 * i + lane / 16;
    const uint4 gate = products_of(part, top + r, chunk), up = products_of(part, top + r, 16 + chunk);
    const u32 g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
    u32 act[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 x = unpacked(g[j]), y = unpacked(u[j]);
      act[j] = packed(activate(x.x, y.x), activate(x.y, y.y));
    }
    if (r < left && c < o.inner) {
      const long long row = first + r;
      store_16(o.out + (row * o.inner + c) * 2, make_uint4(act[0], act[1], act[2], act[3]));
      if (SAVE_PRE) store_pair(o.pre, row, o.inner, c, gate, up);
    }
  }
}
#else
struct Pre { uint4 gate, up; };

__device__ __forceinline__ Pre load_pre(const Outputs& o, long long row, int c) {
  Pre x;
  load_pair(o.pre, row, o.inner, c, x.gate, x.up);
  return x;
}

__device__ __forceinline__ void finish_row(const Outputs& o, const Tile& tile, const uint4& products, const Pre& pre,
                                           float w, long long row, int c) {
  const u32 p[4] = {products.x, products.y, products.z, products.w};
  const u32 g[4] = {pre.gate.x, pre.gate.y, pre.gate.z, pre.gate.w}, u[4] = {pre.up.x, pre.up.y, pre.up.z, pre.up.w};
  u32 act[4], d_gate[4], d_up[4];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 a = unpacked(p[j]), x = unpacked(g[j]), y = unpacked(u[j]);
    const Gradient first = activate_backward(x.x, y.x, a.x * w), second = activate_backward(x.y, y.y, a.y * w);
    act[j] = packed(first.value * w, second.value * w);
    d_gate[j] = packed(first.gate, second.gate);
    d_up[j] = packed(first.up, second.up);
    sum = fmaf(a.x, first.value, fmaf(a.y, second.value, sum));
  }
  const bool inside = c < o.inner;
  sum = inside ? sum : 0.0f;
  if (inside) {
    store_16(o.out + (row * o.inner + c) * 2, make_uint4(act[0], act[1], act[2], act[3]));
    store_pair(o.dpre, row, o.inner, c, make_uint4(d_gate[0], d_gate[1], d_gate[2], d_gate[3]),
               make_uint4(d_up[0], d_up[1], d_up[2], d_up[3]));
  }
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (threadIdx.x % LANES == 0) o.sums[(long long)(tile.col / COLUMNS) * o.rows + row] = sum;
}

// pre is read BATCH rows ahead, the first of them before the products are there.
__device__ __forceinline__ void finish(const Outputs& o, const Tile& tile, u32 part, int first, int left, u32 staged,
                                       u32 parity) {
  constexpr int BATCH = 2;
  const int lane = threadIdx.x % LANES, top = finisher() * HEIGHT;
  const int c = tile.col + lane * 8, at = c < o.inner ? c : 0;
  const float weight = lane < left ? o.weights[o.slots[first + lane]] : 0.0f;
  Pre next[BATCH];
#pragma unroll
  for (int i = 0; i < BATCH; i++)
    if (i < left) next[i] = load_pre(o, first + i, at);
  barrier_wait(staged, parity);
#pragma unroll 1
  for (int r = 0; r < HEIGHT && r < left; r += BATCH) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const Pre pre = next[i];
      const float w = __shfl_sync(0xffffffffu, weight, r + i);
      if (r + i + BATCH < left && r + i + BATCH < HEIGHT) next[i] = load_pre(o, first + r + i + BATCH, at);
      if (r + i < left) finish_row(o, tile, products_of(part, top + r + i, lane), pre, w, first + r + i, c);
    }
  }
}
#endif

// What will be read of pre, into L2: memory is slow, and there is time while the products are made.
__device__ __forceinline__ void prefetch_pre(const Outputs& o, const Tile& tile) {
#if PRODUCT == BACKWARD
  const int lane = threadIdx.x % LANES;
  // A lane's line of 128 bytes: rows of 1024 bytes, gate and up apart or one after another.
  const int line = lane % 8, c = tile.col + (INTERLEAVED ? line * 32 : line % 4 * 64);
  const char* from = o.pre + (INTERLEAVED ? c * 4 : ((line / 4) * o.inner + c) * 2);
  if (c < o.inner)
    for (int row = tile.row + finisher() * 4 + lane / 8; row < min(tile.row_end, tile.row + ROWS); row += 4 * FINISHERS)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + (long long)row * o.inner * 4) : "memory");
#endif
}
