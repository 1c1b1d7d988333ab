// Device code of the `cuda_fp8` backend: a persistent, warp-specialised FP8 grouped GEMM for sm_90a, tiles ROWS x BLOCK_N.
//
// CONSUMERS consumer warpgroups of 64 rows each, a loading warp and a scheduling warp. A ring of STAGES stages, each 128
// summands deep, holds a [ROWS, 128] and b [BLOCK_N, 128] in bytes with the 128-byte swizzle, and the step's scales of a;
// TMA brings all three. A consumer multiplies a stage into `part`, gives the stage back and adds part * scales to `sum`
// in float32, while the other one multiplies; 256 columns in two halves. In tiles at the right edge consumers multiply as
// few columns as there are, in multiples of 64.
//
// The scheduling warp is a tile ahead: it finds the tile, tells the others through one of two slots and copies the
// tile's scales of b for all steps beside it. With up to LANES groups the loading warp finds the first tile itself. Where
// the kernel is `pdl`, it starts while others still run: warps find the first tile by what `offs` says then, and have L2
// fetch the tile's first step. If `offs` says the same when the others are done, the tile stands. With one group, rows up
// to M are tiles before `offs` is read; past its end nothing is stored.
//
// SPLIT > 1: so many programs of a cluster take a tile, each its part of the steps. They send each other their sums, and
// each adds up and stores its part of the columns, the programs' sums in the order of their ranks: same bits every time.
//
// cuda_fp8.py puts in front: the macros (CONSUMERS, ROWS, BLOCK_N, STAGES, GROUP_M, DYNAMIC, SPLIT, CUT, HALF),
// multiply<N>, the wgmma of N columns, whose N/2 operands are written out, launch/parts.cu, launch/groups.cu,
// launch/tiles.cu, _cuda_fp8_store.cu and _cuda_fp8_steps.cu.

template <int WIDTH>
__device__ __forceinline__ void compute(Ring& ring, const Shared& s, int slot, int steps, int part_no, const Tile& tile,
                                        int first, const TensorMap& out_map, char* out, long long pitch, int N,
                                        int rank, u32& shared_before) {
  float sum[WIDTH / 2];
  const u32 at_b = s.scale_b + slot * SCALES_B * steps * 4;
  const int row = first - (tile.row & ~3) + threadIdx.x % 128 / LANES * 16 + threadIdx.x % LANES / 4;
  multiply_tile<WIDTH>(sum, ring, s, at_b, steps, part_no, row, 128 - tile.col % 128);
  if (threadIdx.x % LANES == 0) barrier_arrive(s.tile_empty + slot * 8);
  const u32 mine = s.out + part_no * OUT_BYTES, full = s.sums_full + part_no * 8, empty = s.sums_empty + part_no * 8;
  if constexpr (SPLIT == 1) store_tile<WIDTH>(sum, mine, out_map, out, pitch, tile, first, part_no, N);
  else store_part<WIDTH>(sum, mine, full, empty, out, pitch, tile, first, rank, shared_before++ & 1, N);
}

// Registers of a consumer's threads: two programs with one consumer each fit into a multiprocessor. Of what a program has
// at launch, 168 a thread with two consumers, MANY leave the other warps FEW; with more both would wait for ever.
constexpr int MANY = CONSUMERS == 1 ? 208 : 232, FEW = 40;

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), CONSUMERS == 1 ? 2 : 1)
scaled_grouped_mm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_wide_map,
                  const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap b_wide_map,
                  const __grid_constant__ TensorMap b_rest_map, const __grid_constant__ TensorMap scale_a_map,
                  const __grid_constant__ TensorMap out_map,
                  const int* offs, const float* scale_b, char* out, int* counter, int pdl, int M, int G, int N, int K,
                  long long sb_g, long long sb_n, long long sb_k, long long pitch) {
  extern __shared__ char memory[];
  u32 at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(memory));
  const u32 start = (at + 1023) & ~1023u;
  char* generic = memory + (start - at);
  Shared s;
  s.a = start;
  s.b = s.a + STAGES * A_BYTES;
  s.scale_a = s.b + STAGES * B_BYTES;
  s.out = s.scale_a + STAGES * SCALES_PITCH;
  s.out = (s.out + 1023) & ~1023u;
  s.tile = s.out + CONSUMERS * OUT_BYTES;
  s.full = s.tile + 64;
  s.empty = s.full + STAGES * 8;
  s.tile_full = s.empty + STAGES * 8;
  s.scales_full = s.tile_full + 16;
  s.tile_empty = s.scales_full + 16;
  s.sums_full = s.tile_empty + 16;
  s.sums_empty = s.sums_full + 16;
  const u32 lists = s.sums_empty + 16;
  s.scale_b = lists + 8 * G;
  int* tile_ends = reinterpret_cast<int*>(generic + (lists - start));
  int* row_ends = tile_ends + G;

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / LANES, 0), lane = threadIdx.x % LANES;
  const int group = warp / 4;
  if (warp == 4 * CONSUMERS + 3 && elected()) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&a_wide_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&b_wide_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&scale_a_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&out_map) : "memory");
  }
  if (warp == 0 && lane == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.full + i * 8, 1);
      barrier_init(s.empty + i * 8, 4 * CONSUMERS);
    }
    for (int i = 0; i < 2; i++) {
      barrier_init(s.tile_full + i * 8, 1);
      barrier_init(s.scales_full + i * 8, 1);
      barrier_init(s.tile_empty + i * 8, 1 + 4 * CONSUMERS);
    }
    for (int i = 0; SPLIT > 1 && i < CONSUMERS; i++) {
      barrier_init(s.sums_full + i * 8, 1);
      barrier_init(s.sums_empty + i * 8, 4 * (SPLIT - 1));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  int rank = 0;
  if (SPLIT > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int all_steps = (K + K_STEP - 1) / K_STEP;
  const int first_step = SPLIT == 1 ? 0 : rank * all_steps / SPLIT;
  const int steps = (SPLIT == 1 ? all_steps : (rank + 1) * all_steps / SPLIT) - first_step;
  const int n_full = N / BLOCK_N, n_rest = N - n_full * BLOCK_N;
  const int program = blockIdx.x / SPLIT, programs = gridDim.x / SPLIT;
  // Boxes end where the tensor does: TMA takes 7 clocks for each row outside, 2 inside (H200).
  const int at_once = min(ROWS, M);
  // Each warp that needs the first tile finds it, so that none waits for another. It is never a part of a tile.
  const bool few = G <= LANES, guessed = G == 1 || (pdl && few);
  int row_end = M;  // of the group of this lane
  Tile tile;
  if (group == CONSUMERS && guessed) {
    if (G > 1 && lane < G) row_end = load_now(offs + lane);
    tile = tile_of_few(program, row_end, n_full, n_rest, G);
    if (pdl && warp == 4 * CONSUMERS + 2 && tile.width && elected()) {
      prefetch_2d(a_wide_map, first_step * K_STEP, tile.row);
      prefetch_3d(b_wide_map, first_step * K_STEP, tile.col, tile.group);
    }
  }
  if (SPLIT > 1) cluster_sync();
  else __syncthreads();
  begin_after();
  Ring ring;

  if (group == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEW));
    if (few && warp < 4 * CONSUMERS + 2) {
      const int told = G > 1 && lane < G ? load_now(offs + lane) : row_end;
      const bool stands = guessed && !__ballot_sync(0xffffffffu, told != row_end);
      row_end = told;
      if (!stands) tile = tile_of_few(program, row_end, n_full, n_rest, G);
    }
    bool found = few;
    if (warp == 4 * CONSUMERS && elected()) {
      ring.phases = ~0u;
      const u32 scales_bytes = min(ROWS + 4, (M + 3) / 4 * 4) * 4;
      for (int slot = 0, parity = 0;; slot ^= 1, parity ^= slot == 0) {
        if (!found) {
          barrier_wait(s.tile_full + slot * 8, parity);
          tile = received(s.tile + slot * 32);
        }
        found = false;
        if (tile.width == 0) break;
        const int rows = tile.row_end - tile.row, boxes = rows > 64 ? CONSUMERS : 1;
        const int columns = min(tile.width, N - tile.col), whole = columns / EDGE;
        const u32 a_bytes = (rows >= at_once ? at_once : boxes * min(64, M)) * K_STEP;
        const u32 bytes = a_bytes + columns * K_STEP + scales_bytes;
        for (int step = 0, stage = 0; step < steps; step++) {
          const u32 bar = s.full + stage * 8, a = s.a + stage * A_BYTES, b = s.b + stage * B_BYTES;
          const int k = (first_step + step) * K_STEP;
          barrier_wait(s.empty + stage * 8, ring.parity(stage));
          barrier_expect(bar, bytes);
          if (rows >= at_once) {
            tma_2d(a, a_wide_map, bar, k, tile.row);
          } else {
            for (int i = 0; i < boxes; i++) tma_2d(a + i * A_BOX, a_map, bar, k, first_row(tile, i, at_once));
          }
          tma_2d(s.scale_a + stage * SCALES_PITCH, scale_a_map, bar, tile.row & ~3, first_step + step);
          if (columns == BLOCK_N) {
            tma_3d(b, b_wide_map, bar, k, tile.col, tile.group);
          } else {
            for (int i = 0; i < whole; i++) tma_3d(b + i * B_BOX, b_map, bar, k, tile.col + i * EDGE, tile.group);
            if (columns % EDGE) tma_3d(b + whole * B_BOX, b_rest_map, bar, k, tile.col + whole * EDGE, tile.group);
          }
          ring.passed(stage);
          stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        barrier_arrive(s.tile_empty + slot * 8);
      }
    } else if (warp == 4 * CONSUMERS + 1) {
      // The scheduler: a tile ahead of the others, with its scales of b.
      const int scales_n = (N + 127) / 128, across = n_full + (n_rest != 0);
      Units units{-1, 0, 0, 0, 0, 0};
      int t = program;
      for (int slot = 0, parity = 1;; slot ^= 1, parity ^= slot == 0) {
        barrier_wait(s.tile_empty + slot * 8, parity);
        if (!found) {
          if (units.whole < 0) {
            list_groups(tile_ends, row_ends, G, [=](int g) { return G == 1 ? M : load_now(offs + g); },
                        [=](int rows) { return (rows + ROWS - 1) / ROWS * across; });
            units = units_of(programs, n_full, n_rest, G, tile_ends, row_ends);
          }
          if (DYNAMIC && lane == 0 && t >= programs) counted(counter, t - programs, units.all);
          tile = locate(t, units, n_full, n_rest, G, tile_ends, row_ends);
        }
        found = false;
        if (lane == 0) {
          send(s.tile + slot * 32, tile);
          barrier_arrive(s.tile_full + slot * 8);
        }
        if (tile.width == 0) break;
        int next = t;
        if (DYNAMIC && lane == 0) next = atomicAdd(counter, 1);
        const u32 to = s.scale_b + slot * SCALES_B * steps * 4;
        const int c = tile.col / 128;
        const float *left = scale_b + tile.group * sb_g + c * sb_n, *right = c + 1 < scales_n ? left + sb_n : left;
#pragma unroll 1
        for (int k = lane; k < steps; k += LANES) {
          const float x = left[(first_step + k) * sb_k], y = right[(first_step + k) * sb_k];
          store_shared(to + k * 4, x);
          if (SCALES_B == 2) store_shared(to + (steps + k) * 4, y);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(s.scales_full + slot * 8);
        t = programs + __shfl_sync(0xffffffffu, next, 0);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY));
    ring.phases = 0;
    u32 shared_before = 0;
    const int last = G == 1 ? load_now(offs) : M;
    for (int slot = 0, parity = 0;; slot ^= 1, parity ^= slot == 0) {
      barrier_wait(s.tile_full + slot * 8, parity);
      tile = received(s.tile + slot * 32);
      if (tile.width == 0) break;
      const bool idle = tile.row + group * 64 >= min(tile.row_end, last);
      const int first = first_row(tile, group, at_once);
      tile.row_end = min(tile.row_end, last);
      if (idle) {
        // No wgmma keeps the lanes together here: none must miss what the others give back.
        __syncwarp();
        if (lane == 0) barrier_arrive(s.tile_empty + slot * 8);
        for (int step = 0, stage = 0; step < steps; step++) {
          barrier_wait(s.full + stage * 8, ring.parity(stage));
          __syncwarp();
          s.give_back(stage);
          ring.passed(stage);
          stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        continue;
      }
      barrier_wait(s.scales_full + slot * 8, parity);
      if (SPLIT == 1 || steps) barrier_wait(s.full, ring.parity(0));
      if (tile.width == BLOCK_N)
        compute<BLOCK_N>(ring, s, slot, steps, group, tile, first, out_map, out, pitch, N, rank, shared_before);
#if BLOCK_N > 64
      else if (tile.width == 64)
        compute<64>(ring, s, slot, steps, group, tile, first, out_map, out, pitch, N, rank, shared_before);
#endif
#if BLOCK_N > 128
      else if (BLOCK_N <= 192 || tile.width == 128)
        compute<128>(ring, s, slot, steps, group, tile, first, out_map, out, pitch, N, rank, shared_before);
#endif
#if BLOCK_N > 192
      else
        compute<192>(ring, s, slot, steps, group, tile, first, out_map, out, pitch, N, rank, shared_before);
#endif
    }
    if (threadIdx.x % 128 < LANES) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  // The other program may still load or arrive here.
  if (SPLIT > 1) cluster_sync();
}
