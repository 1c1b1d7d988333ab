// Device code of the `cuda_grouped` backend: a persistent, warp-specialised grouped GEMM for sm_90a.
//
// Tiles of ROWS x BLOCK_N, two consumer warpgroups, a loading warp and a scheduling warp, which finds tiles and
// tells the others. A ring of STAGES stages, each 64 summands deep, holds a and b with the 128-byte swizzle; TMA
// brings both. The consumers share a tile, 64 rows each, or take tiles in turn (PINGPONG): one stores while the
// other multiplies. In tiles at the right edge they multiply as few columns as there are, in multiples of 64.
//
//   RAGGED_M  a [rows, K], of which each group has some; b [G, N, K] (K_MAJOR) or [G, K, N]
//   GATED     RAGGED_M with b [G, 2I, K]: a tile's left half is gate, its right half up. act = f(gate, up), of the rounded
//             products, and these to pre where SAVE_PRE; in either order of columns (INTERLEAVED)
//   RAGGED_K  a [K, M] and b [K, N], of which each group has some rows. Its result [G, M, N] is stored as G M rows, of
//             which each group has M: so both find their tiles alike. ADD: it is added to what is there, float32.
//
// cuda_grouped.py puts in front: the macros (RAGGED_K, K_MAJOR, GATED, SAVE_PRE, INTERLEAVED, ACTIVATION, BIAS, ROWS,
// BLOCK_N, STAGES, SLOTS, GROUP_M, DYNAMIC, PINGPONG, STORE_SLOTS, CUT, OUT_BYTES (of an element of the result), ADD,
// HALF), multiply<N>, the wgmma of N columns, where GATED _cuda_activation.cu, launch/parts.cu, launch/groups.cu,
// launch/tiles.cu, launch/ring.cu and _cuda_grouped_store.cu.

constexpr int CONSUMERS = 2, STEP = 64;
constexpr int PARTS = PINGPONG ? ROWS / 64 : 1;  // of 64 rows, of a consumer's tile

struct Stage {
  static constexpr int COUNT = STAGES;
  static constexpr u32 PART = BLOCK_BYTES, A_BYTES = ROWS * 128;
  static constexpr u32 B_BYTES = K_MAJOR ? BLOCK_N * 128 : (BLOCK_N + 63) / 64 * PART;
  static constexpr u32 A_NEXT = RAGGED_K ? 128 : 2, B_NEXT = K_MAJOR ? 2 : 128;
  static constexpr bool COPIED = false, UNIFORM = false;
};

struct Shared { u32 a, b, out, tile, full, empty, tile_full, tile_empty, turn, asked; };

// Steps of a tile: from summand k on, which ends at k_end.
struct Span { int k, k_end, steps; };

__device__ __forceinline__ Span span_of(u32 at) {
  Span x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x.k) : "r"(at + 20) : "memory");
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x.k_end) : "r"(at + 24) : "memory");
  x.steps = (x.k_end - x.k + STEP - 1) / STEP;
  return x;
}

struct Inputs {
  const TensorMap *a_map, *a_wide_map, *b_map, *b_wide_map, *b_rest_map;  // GATED: b_map of gate, b_wide_map of up
  int M, N, at_once;
};

// One stage, by one lane.
__device__ __forceinline__ void load(const Shared& s, const Inputs& in, const Tile& tile, const Span& span, int stage,
                                     int step) {
  const u32 bar = s.full + stage * 8, a = s.a + stage * Stage::A_BYTES, b = s.b + stage * Stage::B_BYTES;
  const int k = span.k + step * STEP, rows = tile.row_end - tile.row, boxes = ROWS > 64 && rows > 64 ? 2 : 1;
  const int columns = min(tile.width, in.N - tile.col), blocks = (columns + 63) / 64;
#if RAGGED_K
  barrier_expect(bar, (boxes + blocks) * BLOCK_BYTES);
  const int x = tile.group * in.M;
  for (int i = 0; i < boxes; i++)
    tma_ragged(a + i * BLOCK_BYTES, *in.a_map, bar, first_row(tile, i, ROWS) - x, k, span.k_end);
  for (int i = 0; i < blocks; i++) tma_ragged(b + i * BLOCK_BYTES, *in.b_map, bar, tile.col + i * 64, k, span.k_end);
#else
  const bool whole = rows >= in.at_once;
  const u32 a_bytes = (whole ? in.at_once : boxes * min(64, in.M)) * 128;
  barrier_expect(bar, a_bytes + (GATED ? BLOCK_N * 128 : K_MAJOR ? columns * 128 : blocks * BLOCK_BYTES));
  if (whole) {
    tma_2d(a, *in.a_wide_map, bar, k, tile.row);
  } else {
    for (int i = 0; i < boxes; i++)
      tma_2d(a + i * BLOCK_BYTES, *in.a_map, bar, k, first_row(tile, i, in.at_once));
  }
#if GATED
  tma_3d(b, *in.b_map, bar, k, tile.col / 2, tile.group);
  tma_3d(b + BLOCK_N / 2 * 128, *in.b_wide_map, bar, k, tile.col / 2, tile.group);
#elif K_MAJOR
  if (columns == BLOCK_N) {
    tma_3d(b, *in.b_wide_map, bar, k, tile.col, tile.group);
  } else {
    for (int i = 0; i < columns / 64; i++)
      tma_3d(b + i * BLOCK_BYTES, *in.b_map, bar, k, tile.col + i * 64, tile.group);
    if (columns % 64)
      tma_3d(b + columns / 64 * BLOCK_BYTES, *in.b_rest_map, bar, k, tile.col + columns / 64 * 64, tile.group);
  }
#else
  for (int i = 0; i < blocks; i++) tma_3d(b + i * BLOCK_BYTES, *in.b_map, bar, tile.col + i * 64, k, tile.group);
#endif
#endif
}

template <int WIDTH, int COUNT>
__device__ __forceinline__ void compute(Ring<STAGES>& ring, const Shared& s, const Tile& tile, const Span& span,
                                        const Outputs& o, int consumer, int at_once, int& piece) {
  float sum[COUNT][WIDTH / 2];
  const u32 a = s.a + (PINGPONG ? 0 : consumer * BLOCK_BYTES), b = s.b, block = BLOCK_BYTES;
  multiply_tile<Stage, WIDTH, COUNT>(sum, ring, s.full, s.empty, RAGGED_K ? block_word(a, block) : low_word(a),
                                     K_MAJOR ? low_word(b) : block_word(b, block), span.steps,
                                     PINGPONG ? s.turn + (consumer ^ 1) * 8 : 0);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const int part = PINGPONG ? i : consumer, first = first_row(tile, part, at_once);
    finish<WIDTH>(sum[i], s.out + consumer * STORE_SLOTS * BLOCK_BYTES, o, tile, part, first, consumer, piece);
  }
}

template <int WIDTH>
__device__ __forceinline__ void compute_rows(Ring<STAGES>& ring, const Shared& s, const Tile& tile, const Span& span,
                                             const Outputs& o, int consumer, int at_once, int& piece) {
  if (PARTS == 1 || tile.row_end - tile.row <= 64) compute<WIDTH, 1>(ring, s, tile, span, o, consumer, at_once, piece);
  else compute<WIDTH, PARTS>(ring, s, tile, span, o, consumer, at_once, piece);
}

__device__ __forceinline__ void consume(const Shared& s, const Outputs& o, int consumer, int at_once) {
  const int lane = threadIdx.x % LANES;
  Ring<STAGES> ring{0, 0};
  int piece = 0;
  for (int number = 0;; number++) {
    const int slot = number % SLOTS;
    barrier_wait(s.tile_full + slot * 8, number / SLOTS & 1);
    const Tile tile = received(s.tile + slot * 32);
    const Span span = span_of(s.tile + slot * 32);
    __syncwarp();
    if (lane == 0) barrier_arrive(s.tile_empty + slot * 8);
    if (tile.width == 0) break;
    if (PINGPONG && number % CONSUMERS != consumer) {
      ring.skip(span.steps);
      continue;
    }
    if (!PINGPONG && tile.row + consumer * 64 >= tile.row_end) {
      pass_tile(ring, s.full, s.empty, span.steps);
      continue;
    }
    // A stage's parity tells two rounds of the ring apart, no more: the other consumer has had all before this tile.
    if (PINGPONG) barrier_wait(s.turn + consumer * 8, (number / CONSUMERS ^ consumer ^ 1) & 1);
    if (GATED || tile.width == BLOCK_N) compute_rows<BLOCK_N>(ring, s, tile, span, o, consumer, at_once, piece);
#if BLOCK_N > 64 && !GATED
    else if (tile.width == 64) compute_rows<64>(ring, s, tile, span, o, consumer, at_once, piece);
#endif
#if BLOCK_N > 128 && !GATED
    else if (BLOCK_N <= 192 || tile.width == 128) compute_rows<128>(ring, s, tile, span, o, consumer, at_once, piece);
#endif
#if BLOCK_N > 192 && !GATED
    else compute_rows<192>(ring, s, tile, span, o, consumer, at_once, piece);
#endif
  }
  if (threadIdx.x % 128 < LANES) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
grouped_mm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap a_wide_map,
           const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap b_wide_map,
           const __grid_constant__ TensorMap b_rest_map, const __grid_constant__ TensorMap out_map,
#if GATED
           const __grid_constant__ TensorMap pre_map, const __grid_constant__ TensorMap pre_up_map, char* pre,
#endif
           const int* offs, const char* bias, char* out, int* counter, int M, int G, int N, int K, long long pitch) {
  extern __shared__ char memory[];
  u32 at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(memory));
  const u32 start = (at + 1023) & ~1023u;
  Shared s;
  s.a = start;
  s.b = s.a + STAGES * Stage::A_BYTES;
  s.out = (s.b + STAGES * Stage::B_BYTES + 1023) & ~1023u;
  s.tile = s.out + CONSUMERS * STORE_SLOTS * BLOCK_BYTES;
  s.full = s.tile + SLOTS * 32;
  s.empty = s.full + STAGES * 8;
  s.tile_full = s.empty + STAGES * 8;
  s.tile_empty = s.tile_full + SLOTS * 8;
  s.turn = s.tile_empty + SLOTS * 8;
  s.asked = s.turn + CONSUMERS * 8;
  int* tile_ends = reinterpret_cast<int*>(memory + (s.asked + 8 - at));
  int* row_ends = tile_ends + G;

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / LANES, 0), lane = threadIdx.x % LANES;
  const int group = warp / 4;
  if (warp == 0 && lane == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.full + i * 8, 1);
      barrier_init(s.empty + i * 8, PINGPONG ? 4 : 4 * CONSUMERS);
    }
    for (int i = 0; i < SLOTS; i++) {
      barrier_init(s.tile_full + i * 8, 1);
      barrier_init(s.tile_empty + i * 8, 1 + 4 * CONSUMERS);
    }
    for (int i = 0; i < CONSUMERS; i++) barrier_init(s.turn + i * 8, 4);
    barrier_init(s.asked, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  begin_after();
  const int at_once = RAGGED_K ? ROWS : min(ROWS, M);
  const int programs = gridDim.x;
  if (group == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;" ::: "memory");
    if (warp == 4 * CONSUMERS && elected()) {
      const Inputs in{&a_map, &a_wide_map, &b_map, &b_wide_map, &b_rest_map, M, N, at_once};
      Ring<STAGES> ring{0, 1};
      for (int number = 0;; number++) {
        const int slot = number % SLOTS;
        barrier_wait(s.tile_full + slot * 8, number / SLOTS & 1);
        const Tile tile = received(s.tile + slot * 32);
        const Span span = span_of(s.tile + slot * 32);
        barrier_arrive(s.tile_empty + slot * 8);
        if (tile.width == 0) break;
        if (DYNAMIC && span.steps == 0) barrier_arrive(s.asked);
        for (int step = 0; step < span.steps; step++) {
          if (DYNAMIC && step == span.steps / 2) barrier_arrive(s.asked);
          barrier_wait(s.empty + ring.stage * 8, ring.parity);
          load(s, in, tile, span, ring.stage, step);
          ring.advance();
        }
      }
    } else if (warp == 4 * CONSUMERS + 1) {
      const int n_full = N / BLOCK_N, rest = N - n_full * BLOCK_N, across = n_full + (rest != 0);
      list_groups(tile_ends, row_ends, G, [=](int g) { return RAGGED_K ? (g + 1) * M : min(offs[g], M); },
                  [=](int rows) { return (rows + ROWS - 1) / ROWS * across; });
      const Units units = units_of(programs, n_full, rest, G, tile_ends, row_ends);
      int t = blockIdx.x;
      for (int number = 0;; number++) {
        const int slot = number % SLOTS;
        barrier_wait(s.tile_empty + slot * 8, ~(number / SLOTS) & 1);
        if (DYNAMIC && number && lane == 0) counted(counter, t - programs, units.all);
        const Tile tile = locate(t, units, n_full, rest, G, tile_ends, row_ends);
        if (lane == 0) {
          const u32 to = s.tile + slot * 32;
          send(to, tile);
          const bool any = RAGGED_K && tile.width;
          const int k = any && tile.group ? offs[tile.group - 1] : 0, k_end = any ? offs[tile.group] : K;
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + 20), "r"(k) : "memory");
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + 24), "r"(k_end) : "memory");
          barrier_arrive(s.tile_full + slot * 8);
        }
        if (tile.width == 0) break;
        // A number that is taken too soon leaves its tile behind others' at the end.
        if (DYNAMIC) barrier_wait(s.asked, number & 1);
        int next = t;
        if (DYNAMIC && lane == 0) next = atomicAdd(counter, 1);
        t = programs + __shfl_sync(0xffffffffu, next, 0);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;" ::: "memory");
#if GATED
    const int I = N / 2, of_pre = INTERLEAVED ? N : I;
    const Outputs o{{&out_map, out, pitch, I}, {&pre_map, pre, 2 * pitch, of_pre}, {&pre_up_map, pre + pitch, 2 * pitch, I},
                    bias, M, N};
#else
    const Outputs o{{&out_map, out, pitch, N}, {}, {}, bias, M, N};
#endif
    consume(s, o, group, at_once);
  }
}
