// Device code of the `cuda_wgrad` backend: weight gradients that gather one operand, for sm_90a.
//
// out[g] = sum over rows r of expert g of x[rows[r]]^T d[r], tiles of 128 columns of x by TILE_D of d. Two consumer
// warpgroups share a tile, 64 columns of x each. Four producer warps keep a ring of STAGES stages of 64 rows full: x by
// cp.async, 16 bytes a thread, since every row has an address of its own, d by TMA. Both lie in shared memory as they do
// in memory, columns contiguous, in blocks of 64 columns with the 128-byte swizzle; wgmma transposes.
//
// TURNED: out is [E, columns of d, columns of x], so stmatrix turns the tile on its way to memory.
//
// cuda_wgrad.py puts in front: the macros (STAGES, BAND, TURNED, HALF), multiply, the wgmma of 256 columns,
// launch/parts.cu, launch/groups.cu and launch/ring.cu.

constexpr int CONSUMERS = 2, TILE_X = 128, TILE_D = 256, STEP = 64, PRODUCERS = 128;
constexpr int STORE_SLOTS = 2;                   // of a consumer's pieces on their way to memory
constexpr int BLOCK = 64;                        // columns of a block in shared memory, 128 bytes
constexpr u32 BLOCK_BYTES = STEP * BLOCK * 2;    // of x or d
constexpr u32 X_BYTES = TILE_X / BLOCK * BLOCK_BYTES, D_BYTES = TILE_D / BLOCK * BLOCK_BYTES;
constexpr u32 OUT_BYTES = BLOCK * BLOCK * 2;     // a piece of the result

struct Stage {
  static constexpr int COUNT = STAGES;
  static constexpr u32 PART = BLOCK_BYTES, A_BYTES = X_BYTES, B_BYTES = D_BYTES;
  static constexpr u32 A_NEXT = 128, B_NEXT = 128;  // 16 rows further are 2048 bytes
  static constexpr bool COPIED = true, UNIFORM = true;
};
constexpr int COPIES = STEP * TILE_X / 8 / PRODUCERS;  // 16-byte copies of a producer for a step

struct Tile { int group, x, d, row, rows; };

// Bands of BAND tiles along x, down d first: what runs side by side shares columns of both.
__device__ __forceinline__ Tile locate(int t, int tiles_x, int tiles_d, const int* offs) {
  Tile found;
  const int of_group = tiles_x * tiles_d;
  found.group = t / of_group;
  t -= found.group * of_group;
  const int band = t / (BAND * tiles_d), left = tiles_x - band * BAND, here = left < BAND ? left : BAND;
  t -= band * BAND * tiles_d;
  found.d = t / here * TILE_D;
  found.x = (band * BAND + t % here) * TILE_X;
  found.row = found.group ? offs[found.group - 1] : 0;
  found.rows = offs[found.group] - found.row;
  return found;
}

struct Shared { u32 x, d, out, full, empty; };

// Of the row numbers of a step each warp needs 16, so each lane asks for one; past the group's last row, that one's.
__device__ __forceinline__ int token_of(const int* rows, const Tile& tile, int step, int row) {
  int r = step * STEP + row;
  r = r < tile.rows ? r : tile.rows - 1;
  return tile.rows > 0 ? rows[tile.row + r] : 0;
}

__device__ __forceinline__ void produce(const Shared& s, const TensorMap& d_map, const char* x, const int* rows,
                                        const int* offs, long long pitch, int width, int tiles_x, int tiles_d, int total) {
  const int thread = threadIdx.x % PRODUCERS, lane = threadIdx.x % LANES, warp = thread / LANES;
  // This thread's copies: rows first_row + 8 i, 16 bytes of number `chunk` of the tile's 256.
  const int first_row = thread / 16, chunk = thread % 16;
  const u32 to = s.x + chunk / 8 * BLOCK_BYTES + first_row * 128 + ((chunk % 8 ^ first_row % 8) << 4);
  const int asked = 2 * warp + (lane & 1) + 8 * (lane / 2 % 8);
  Ring<STAGES> ring{0, 1};
  for (int t = blockIdx.x; t < total; t += gridDim.x) {
    const Tile tile = locate(t, tiles_x, tiles_d, offs);
    const bool inside = tile.x + chunk * 8 < width;
    const char* column = x + (tile.x + chunk * 8) * 2;
    int token = token_of(rows, tile, 0, asked);
    for (int step = 0; step * STEP < tile.rows; step++) {
      const int next = token_of(rows, tile, step + 1, asked);
      const u32 bar = s.full + ring.stage * 8;
      barrier_wait(s.empty + ring.stage * 8, ring.parity);
      const int left = tile.rows - step * STEP;
      if (warp == 0 && elected()) {
        barrier_expect(bar, D_BYTES);
#pragma unroll
        for (int i = 0; i < TILE_D / BLOCK; i++)
          tma_ragged(s.d + ring.stage * D_BYTES + i * BLOCK_BYTES, d_map, bar, tile.d + i * BLOCK, tile.row + step * STEP,
                     tile.row + tile.rows);
      }
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const long long from = __shfl_sync(0xffffffffu, token, (first_row & 1) + 2 * i);
        const u32 bytes = inside && first_row + 8 * i < left ? 16 : 0;
        copy_16(to + ring.stage * X_BYTES + i * 1024, column + from * pitch, bytes);
      }
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
      token = next;
      ring.advance();
    }
  }
}

// 64 columns of x by TILE_D of d go to memory in pieces of 64 x 64, through STORE_SLOTS places in turn.
__device__ __forceinline__ void store(const float* sum, const Shared& s, const TensorMap& out_map, const Tile& tile,
                                      int consumer, int x, int width_x, int width_d, int& slot) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % LANES, warp = thread / LANES;
#pragma unroll
  for (int piece = 0; piece < TILE_D / BLOCK; piece++) {
    const u32 buffer = s.out + (STORE_SLOTS * consumer + slot) * OUT_BYTES;
    if (warp == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STORE_SLOTS - 1) : "memory");
    warpgroup_sync(consumer);
#pragma unroll
    for (int block = 0; block < BLOCK / 16; block++) {
      const float* y = sum + (piece * (BLOCK / 16) + block) * 8;
#if TURNED
      const u32 a = packed(y[0], y[1]), b = packed(y[2], y[3]), c = packed(y[4], y[5]), d = packed(y[6], y[7]);
      const u32 to = buffer + (block * 16 + lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2 ^ lane % 8) << 4);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                   "r"(d) : "memory");
#else
      const u32 to = buffer + (warp * 16 + lane % 16) * 128 + ((block * 2 + lane / 16 ^ lane % 8) << 4);
      store_matrices(to, y);
#endif
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    warpgroup_sync(consumer);
    const int d = tile.d + piece * BLOCK;
    if (warp == 0 && elected()) {
      if (x < width_x && d < width_d) tma_store_3d(out_map, buffer, TURNED ? x : d, TURNED ? d : x, tile.group);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    if (++slot == STORE_SLOTS) slot = 0;
  }
}

__device__ __forceinline__ void consume(const Shared& s, const TensorMap& out_map, const int* offs, int consumer,
                                        int width_x, int width_d, int tiles_x, int tiles_d, int total) {
  const u32 a = block_word(s.x + consumer * BLOCK_BYTES, BLOCK_BYTES), b = block_word(s.d, BLOCK_BYTES);
  Ring<STAGES> ring{0, 0};
  int slot = 0;
  for (int t = blockIdx.x; t < total; t += gridDim.x) {
    const Tile tile = locate(t, tiles_x, tiles_d, offs);
    float sum[1][TILE_D / 2];
    multiply_tile<Stage, TILE_D, 1>(sum, ring, s.full, s.empty, a, b, (tile.rows + STEP - 1) / STEP, 0);
    store(sum[0], s, out_map, tile, consumer, tile.x + consumer * BLOCK, width_x, width_d, slot);
  }
  if (threadIdx.x % 128 < LANES) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128 * CONSUMERS + PRODUCERS, 1)
gathered_wgrad(const __grid_constant__ TensorMap d_map, const __grid_constant__ TensorMap out_map, const char* x,
               const int* rows, const int* offs, int G, int width_x, int width_d, long long pitch) {
  extern __shared__ char memory[];
  u32 at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(memory));
  Shared s;
  s.x = (at + 1023) & ~1023u;
  s.d = s.x + STAGES * X_BYTES;
  s.out = s.d + STAGES * D_BYTES;
  s.full = s.out + STORE_SLOTS * CONSUMERS * OUT_BYTES;
  s.empty = s.full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.full + i * 8, PRODUCERS + 1);
      barrier_init(s.empty + i * 8, 4 * CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  begin_after();
  __syncthreads();
  const int tiles_x = (width_x + TILE_X - 1) / TILE_X, tiles_d = (width_d + TILE_D - 1) / TILE_D;
  const int total = G * tiles_x * tiles_d;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (group == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(56));
    produce(s, d_map, x, rows, offs, pitch, width_x, tiles_x, tiles_d, total);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(224));
    consume(s, out_map, offs, group, width_x, width_d, tiles_x, tiles_d, total);
  }
}
