// Device code of the `cuda_fp8` backend: a persistent, warp-specialised FP8 grouped GEMM for sm_90a, tiles 128 x BLOCK_N.
//
// Two consumer warpgroups of 64 rows each and one producer warp share a ring of STAGES stages, each 128 summands deep:
// a [128, 128] and b [BLOCK_N, 128] in bytes with the 128-byte swizzle, and the step's scales. A consumer multiplies a
// stage into `part`, gives the stage back and adds part * scales to `sum` in float32, while the other one multiplies.
//
// In tiles at the right edge consumers multiply as few columns as there are, in multiples of 64.
//
// cuda_fp8.py puts in front: the macros (BLOCK_N, STAGES, GROUP_M, OUT_HALF) and multiply<N>, the wgmma of N columns,
// whose N/2 operands are written out.

constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, K_STEP = 128;
constexpr int GRAIN = 64;  // columns that surely share a scale of b
constexpr int SEGMENTS = BLOCK_N / GRAIN;
constexpr u32 A_BOX = 64 * K_STEP, A_BYTES = ROWS * K_STEP, B_BYTES = BLOCK_N * K_STEP;
constexpr int LANES = 32;
static_assert(STAGES <= 8, "steps are written out for so many stages");
static_assert(BLOCK_N % GRAIN == 0, "scales of b change every 128 columns, tiles begin on multiples of BLOCK_N");

struct alignas(64) TensorMap { char opaque[128]; };

struct Tile { int group, row, row_end, col, width; };

// ---- barriers ----

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra.uni over;\n bra.uni again;\nover:\n}" ::"r"(bar), "r"(parity) : "memory");
}

// Whether the wait would be over at once.
__device__ __forceinline__ bool barrier_passed(u32 bar, u32 parity) {
  u32 passed;
  asm volatile(
      "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
      : "=r"(passed) : "r"(bar), "r"(parity) : "memory");
  return passed;
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// ---- copies ----

__device__ __forceinline__ void tma_2d(u32 to, const TensorMap& map, u32 bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(bar), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void tma_3d(u32 to, const TensorMap& map, u32 bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to), "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory");
}

__device__ __forceinline__ void copy_4(u32 to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ float load_shared(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}

// ---- tensor cores ----

// The low word of the descriptor of a matrix in shared memory, K contiguous in rows of 128 bytes with the 128-byte
// swizzle: the address in units of 16 bytes. 32 summands further are 2 units. (The high word says that 8 rows make 1024
// bytes, and names the swizzle.)
__device__ __forceinline__ u32 low_word(u32 address) { return ((address & 0x3FFFF) >> 4) | 1 << 16; }

template <int N>
__device__ __forceinline__ void hold(float* x) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// ---- tiles ----

// Tile number -> tile. row_tiles[g]: rows of tiles up to and including group g; row_ends[g]: its last row + 1.
__device__ __forceinline__ Tile locate(int t, int n_full, int rest, int G, const int* row_tiles,
                                       const int* row_ends) {
  const int lane = threadIdx.x % LANES;
  const int across = n_full + (rest != 0);
  const int q = t / across;
  int g = 0;
  for (int base = 0; base < G; base += LANES) {
    const unsigned before =
        __ballot_sync(0xffffffffu, base + lane < G && row_tiles[base + lane < G ? base + lane : 0] <= q);
    g += __popc(before);
    if (before != 0xffffffffu) break;
  }
  const int first = g ? row_tiles[g - 1] : 0;
  const int row = g ? row_ends[g - 1] : 0;
  const int tiles_m = row_tiles[g] - first;
  const int tile = t - first * across;
  // About GROUP_M rows of tiles at a time, cut evenly, down the rows first.
  int bands = (tiles_m + GROUP_M / 2) / GROUP_M;
  bands = bands < 1 ? 1 : bands;
  const int height = (tiles_m + bands - 1) / bands;
  const int band = tile / (height * across);
  const int inner = tile - band * height * across;
  const int left = tiles_m - band * height;
  const int here = left < height ? left : height;
  const int n = inner / here;
  const bool narrow = n == n_full;
  Tile found;
  found.group = g;
  found.row = row + (band * height + inner - n * here) * ROWS;
  found.row_end = row_ends[g];
  found.width = narrow ? (rest + GRAIN - 1) / GRAIN * GRAIN : BLOCK_N;
  found.col = (narrow ? n_full : n) * BLOCK_N;
  return found;
}

// The producer finds tiles and tells consumers, for whom the divisions would stand between two tiles. It writes when stage
// 0 is empty, they read when stage 0 is full.
__device__ __forceinline__ void send(u32 at, const Tile& t) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(t.row), "r"(t.row_end), "r"(t.col), "r"(t.width)
               : "memory");
}

__device__ __forceinline__ Tile received(u32 at) {
  Tile t;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(t.row), "=r"(t.row_end), "=r"(t.col), "=r"(t.width) : "r"(at) : "memory");
  t.group = 0;
  return t;
}

// A tile's steps take the stages from the first on, so that consumers know them at compile time; the last steps of a
// tile may leave some unused. `phases`: bit i is the parity of what stage i is waited for next.
struct Ring {
  u32 phases;
  __device__ __forceinline__ u32 parity(int stage) const { return phases >> stage & 1; }
  __device__ __forceinline__ void passed(int stage) { phases ^= 1u << stage; }
};

struct Shared {
  u32 a, b, scale_a, scale_b, full, empty, tile;
  // A warp of consumers is through with a stage.
  __device__ __forceinline__ void give_back(int stage) const {
    if (threadIdx.x % LANES == 0) barrier_arrive(empty + stage * 8);
  }
};

template <int WIDTH>
struct Scales {
  float down_0, down_1, across[(WIDTH + GRAIN - 1) / GRAIN];
  __device__ __forceinline__ void load(u32 at_a, u32 at_b, int stage) {
    down_0 = load_shared(at_a + stage * ROWS * 4);
    down_1 = load_shared(at_a + stage * ROWS * 4 + 32);
#pragma unroll
    for (int i = 0; i < (WIDTH + GRAIN - 1) / GRAIN; i++) across[i] = load_shared(at_b + (stage * SEGMENTS + i) * 4);
  }
  __device__ __forceinline__ void promote(float* sum, const float* part) const {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++) {
      const float by = across[n * 8 / GRAIN], scale_0 = down_0 * by, scale_1 = down_1 * by;
      float* to = sum + n * 4;
      to[0] = fmaf(part[n * 4 + 0], scale_0, to[0]);
      to[1] = fmaf(part[n * 4 + 1], scale_0, to[1]);
      to[2] = fmaf(part[n * 4 + 2], scale_1, to[2]);
      to[3] = fmaf(part[n * 4 + 3], scale_1, to[3]);
    }
  }
};

// What a consumer needs for a tile's steps; a, b: low words of the descriptors of the first stage's matrices.
struct Steps {
  const Shared& s;
  Ring& ring;
  u32 a, b, at_a;
  int step, steps;
};

// One step, from stage STAGE: sum += (a_stage . b_stage) * scales. Whether it was the tile's last.
template <int WIDTH, int STAGE>
__device__ __forceinline__ bool multiply_step(float* sum, float* part, Steps& t) {
  constexpr int NEXT = (STAGE + 1) % STAGES;
  Scales<WIDTH> scales;
  scales.load(t.at_a, t.s.scale_b, STAGE);
  hold<WIDTH / 2>(part);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  constexpr int A = STAGE * A_BYTES / 16, B = STAGE * B_BYTES / 16;
  multiply<A, B, 0>(Columns<WIDTH>(), part, t.a, t.b);
  multiply<A + 2, B + 2, 1>(Columns<WIDTH>(), part, t.a, t.b);
  multiply<A + 4, B + 4, 1>(Columns<WIDTH>(), part, t.a, t.b);
  multiply<A + 6, B + 6, 1>(Columns<WIDTH>(), part, t.a, t.b);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  t.ring.passed(STAGE);
  const u32 next_parity = t.ring.parity(NEXT);
  t.step++;
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  hold<WIDTH / 2>(part);
  t.s.give_back(STAGE);
  // Nothing but the products shall stand behind the promotion: the next stage is looked at before.
  const bool ready = barrier_passed(t.s.full + NEXT * 8, next_parity);
  scales.promote(sum, part);
  if (t.step == t.steps) return true;
  if (!ready) barrier_wait(t.s.full + NEXT * 8, next_parity);
  return false;
}

// One tile of WIDTH columns. row: this thread's first row in the tile.
template <int WIDTH>
__device__ __forceinline__ void multiply_tile(float* sum, Ring& ring, const Shared& s, int steps, int part_no,
                                              int row) {
  float part[WIDTH / 2];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; i++) sum[i] = 0.0f;
  Steps t{s, ring, low_word(s.a + part_no * A_BOX), low_word(s.b), s.scale_a + row * 4, 0, steps};
  // Written out, because compilers do not unroll loops that end in the middle.
#define STEP(i)                                                    \
  if constexpr (i < STAGES)                                        \
    if (multiply_step<WIDTH, i % STAGES>(sum, part, t)) break;
  for (;;) {
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
  }
#undef STEP
}

__device__ __forceinline__ u32 packed(float low, float high) {
  u32 x;
#if OUT_HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
  return x;
}

// Four lanes of a row hold columns 2q, 2q+1 of four blocks of 8 columns; after this lane q holds all of block q.
__device__ __forceinline__ void transpose(u32 (&x)[4], int q) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = q & bit;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      const u32 got = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
      if (upper) x[i] = got;
      else x[i + bit] = got;
    }
  }
}

// Rows of the group, columns that exist: 64 bytes of each row at a time, straight from registers.
template <int WIDTH>
__device__ __forceinline__ void store_tile(const float* sum, char* out, long long pitch, int row, int row_end, int col,
                                           int N) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool mine = row + half * 8 < row_end;
    char* at = out + (row + half * 8) * pitch;
#pragma unroll
    for (int block = 0; block < WIDTH / 32; block++) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int j = (block * 4 + i) * 4 + half * 2;
        x[i] = packed(sum[j], sum[j + 1]);
      }
      transpose(x, q);
      const int c = col + block * 32 + q * 8;
      if (mine && c < N)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at + c * 2), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                     "r"(x[3]) : "memory");
    }
  }
}

template <int WIDTH>
__device__ __forceinline__ void compute(Ring& ring, const Shared& s, int steps, int part_no, int row,
                                        const Tile& tile, char* out, long long pitch, int N) {
  float sum[WIDTH / 2];
  multiply_tile<WIDTH>(sum, ring, s, steps, part_no, row);
  store_tile<WIDTH>(sum, out, pitch, tile.row + row, tile.row_end, tile.col, N);
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
scaled_grouped_mm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const int* offs,
                  const float* scale_a, const float* scale_b, char* out, int G, int M, int N, int K, long long sa_m,
                  long long sa_k, long long sb_g, long long sb_n, long long sb_k, long long pitch) {
  extern __shared__ char memory[];
  u32 at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(memory));
  const u32 start = (at + 1023) & ~1023u;
  char* generic = memory + (start - at);
  Shared s;
  s.a = start;
  s.b = s.a + STAGES * A_BYTES;
  s.scale_a = s.b + STAGES * B_BYTES;
  s.tile = s.scale_a + STAGES * ROWS * 4;
  s.full = s.tile + 16;
  s.empty = s.full + STAGES * 8;
  s.scale_b = s.empty + STAGES * 8;
  const u32 lists = s.scale_b + STAGES * SEGMENTS * 4;
  int* row_tiles = reinterpret_cast<int*>(generic + (lists - start));
  int* row_ends = row_tiles + G;

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / LANES, 0), lane = threadIdx.x % LANES;
  if (warp == 4 * CONSUMERS && lane == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&a_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&b_map) : "memory");
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.full + i * 8, 1 + LANES);
      barrier_init(s.empty + i * 8, 4 * CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (warp == 0) {
    int tiles = 0;
    for (int base = 0; base < G; base += LANES) {
      const int g = base + lane;
      const int end = g < G ? offs[g] : 0, begin = g < G && g ? offs[g - 1] : 0;
      int x = g < G ? (end - begin + ROWS - 1) / ROWS : 0;
#pragma unroll
      for (int d = 1; d < LANES; d *= 2) {
        const int y = __shfl_up_sync(0xffffffffu, x, d);
        if (lane >= d) x += y;
      }
      if (g < G) {
        row_tiles[g] = tiles + x;
        row_ends[g] = end;
      }
      tiles += __shfl_sync(0xffffffffu, x, LANES - 1);
    }
  }
  __syncthreads();

  const int first = blockIdx.x, stride = gridDim.x;
  const int steps = (K + K_STEP - 1) / K_STEP;
  const int n_full = N / BLOCK_N, n_rest = N - n_full * BLOCK_N;
  const int total = row_tiles[G - 1] * (n_full + (n_rest != 0));
  const int group = warp / 4;
  Ring ring;

  if (group == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
    if (warp == 4 * CONSUMERS) {
      ring.phases = ~0u;
      const int scales_n = (N + 127) / 128;
      for (int t = first; t < total; t += stride) {
        const Tile tile = locate(t, n_full, n_rest, G, row_tiles, row_ends);
        const int rows = tile.row_end - tile.row;
        const int boxes = rows <= 0 ? 0 : rows > ROWS - 64 ? CONSUMERS : (rows + 63) / 64;
        const float* from_a[ROWS / LANES];
#pragma unroll
        for (int i = 0; i < ROWS / LANES; i++) {
          const int r = tile.row + i * LANES + lane;
          from_a[i] = scale_a + (r < M ? r : M - 1) * sa_m;
        }
        const int c = (tile.col + lane * GRAIN) / 128;
        const float* from_b = scale_b + tile.group * sb_g + (c < scales_n ? c : scales_n - 1) * sb_n;
        for (int step = 0, stage = 0; step < steps; step++) {
          const u32 bar = s.full + stage * 8;
          barrier_wait(s.empty + stage * 8, ring.parity(stage));
          if (step == 0 && lane == 0) send(s.tile, tile);
          if (lane == 0) {
            const u32 a = s.a + stage * A_BYTES;
            const u32 b = s.b + stage * B_BYTES;
            const int k = step * K_STEP;
            barrier_expect(bar, boxes * A_BOX + B_BYTES);
            for (int i = 0; i < boxes; i++) tma_2d(a + i * A_BOX, a_map, bar, k, tile.row + i * 64);
            tma_3d(b, b_map, bar, k, tile.col, tile.group);
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < ROWS / LANES; i++) {
            copy_4(s.scale_a + (stage * ROWS + i * LANES + lane) * 4, from_a[i]);
            from_a[i] += sa_k;
          }
          if (lane < SEGMENTS) copy_4(s.scale_b + (stage * SEGMENTS + lane) * 4, from_b);
          from_b += sb_k;
          asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
          ring.passed(stage);
          stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232));
    ring.phases = 0;
    const int row = warp * 16 + lane / 4;
    for (int t = first; t < total; t += stride) {
      barrier_wait(s.full, ring.parity(0));
      const Tile tile = received(s.tile);
      if (tile.row + group * 64 >= tile.row_end) {
        for (int step = 0, stage = 0; step < steps; step++) {
          barrier_wait(s.full + stage * 8, ring.parity(stage));
          s.give_back(stage);
          ring.passed(stage);
          stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        continue;
      }
      if (tile.width == BLOCK_N)
        compute<BLOCK_N>(ring, s, steps, group, row, tile, out, pitch, N);
#if BLOCK_N > 64
      else if (tile.width == 64)
        compute<64>(ring, s, steps, group, row, tile, out, pitch, N);
#endif
#if BLOCK_N > 128
      else
        compute<128>(ring, s, steps, group, row, tile, out, pitch, N);
#endif
    }
  }
}
