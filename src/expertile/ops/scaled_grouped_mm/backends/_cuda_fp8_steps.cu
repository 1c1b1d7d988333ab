// Steps of the `cuda_fp8` kernel: what its consumers do with one stage of the ring, and with all stages of a tile.

constexpr int K_STEP = 128;
// Scales of b change every 128 columns, in a tile once at most, behind a multiple of GRAIN columns.
constexpr int GRAIN = BLOCK_N % 128 == 0 ? 128 : BLOCK_N % 64 == 0 ? 64 : BLOCK_N % 32 == 0 ? 32 : 16;
constexpr int SCALES_B = 128 % BLOCK_N ? 2 : 1;  // of a step
static_assert(SCALES_B == 1 || BLOCK_N <= 128 + GRAIN, "a tile has no third scale of b");
constexpr u32 A_BOX = 64 * K_STEP, A_BYTES = ROWS * K_STEP, B_BYTES = BLOCK_N * K_STEP;
constexpr u32 B_BOX = EDGE * K_STEP;
// TMA begins at multiples of 16 bytes, so up to 3 scales of rows before the tile come with it.
constexpr u32 SCALES_PITCH = 640;
static_assert(STAGES <= 8, "steps are written out for so many stages");

// A tile's steps take the stages from the first on, so that consumers know them at compile time; the last steps of a
// tile may leave some unused. `phases`: bit i is the parity of what stage i is waited for next.
struct Ring {
  u32 phases;
  __device__ __forceinline__ u32 parity(int stage) const { return phases >> stage & 1; }
  __device__ __forceinline__ void passed(int stage) { phases ^= 1u << stage; }
};

struct Shared {
  u32 a, b, scale_a, scale_b, out, tile, full, empty, tile_full, scales_full, tile_empty, sums_full, sums_empty;
  // A warp of consumers is through with a stage.
  __device__ __forceinline__ void give_back(int stage) const {
    if (threadIdx.x % LANES == 0) barrier_arrive(empty + stage * 8);
  }
};

template <int WIDTH>
struct Scales {
  static constexpr int PARTS = (WIDTH + GRAIN - 1) / GRAIN;
  float scale_0[PARTS], scale_1[PARTS];
  // first: columns before the second scale of b.
  __device__ __forceinline__ void load(u32 at_a, int stage, u32 at_b, int steps, int first) {
    const float down_0 = load_shared(at_a + stage * SCALES_PITCH), down_1 = load_shared(at_a + stage * SCALES_PITCH + 32);
    const float left = load_shared(at_b), right = SCALES_B == 2 ? load_shared(at_b + steps * 4) : left;
    const float left_0 = down_0 * left, left_1 = down_1 * left, right_0 = down_0 * right, right_1 = down_1 * right;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      scale_0[i] = SCALES_B == 1 || i * GRAIN < first ? left_0 : right_0;
      scale_1[i] = SCALES_B == 1 || i * GRAIN < first ? left_1 : right_1;
    }
  }
  __device__ __forceinline__ void promote(float* sum, const float* part) const {
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++) {
      float* to = sum + n * 4;
      to[0] = fmaf(part[n * 4 + 0], scale_0[n * 8 / GRAIN], to[0]);
      to[1] = fmaf(part[n * 4 + 1], scale_0[n * 8 / GRAIN], to[1]);
      to[2] = fmaf(part[n * 4 + 2], scale_1[n * 8 / GRAIN], to[2]);
      to[3] = fmaf(part[n * 4 + 3], scale_1[n * 8 / GRAIN], to[3]);
    }
  }
};

// What a consumer needs for a tile's steps; a, b: low words of the descriptors of the first stage's matrices.
struct Steps {
  const Shared& s;
  Ring& ring;
  u32 a, b, at_a, at_b;
  int step, steps, first;
};

// Queue the products of stage STAGE; FROM: of b's columns from there on.
template <int WIDTH, int STAGE, int FROM = 0>
__device__ __forceinline__ void queue_products(float* part, const Steps& t) {
  hold<WIDTH / 2>(part);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  constexpr int A = STAGE * A_BYTES / 16, B = (STAGE * B_BYTES + FROM * K_STEP) / 16;
  multiply<A, B, 0>(Columns<WIDTH>(), part, t.a, t.b);
  multiply<A + 2, B + 2, 1>(Columns<WIDTH>(), part, t.a, t.b);
  multiply<A + 4, B + 4, 1>(Columns<WIDTH>(), part, t.a, t.b);
  multiply<A + 6, B + 6, 1>(Columns<WIDTH>(), part, t.a, t.b);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// One step, from stage STAGE: sum += (a_stage . b_stage) * scales, WIDTH columns at a time. Whether it was the tile's last.
template <int WIDTH, int HALVES, int STAGE>
__device__ __forceinline__ bool multiply_step(float* sum, float* part, Steps& t) {
  constexpr int NEXT = (STAGE + 1) % STAGES;
  Scales<WIDTH> scales;
  scales.load(t.at_a, STAGE, t.at_b + t.step * 4, t.steps, t.first);
  queue_products<WIDTH, STAGE>(part, t);
  if constexpr (HALVES == 2) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold<WIDTH / 2>(part);
    scales.promote(sum, part);
    sum += WIDTH / 2;
    scales.load(t.at_a, STAGE, t.at_b + (t.steps + t.step) * 4, 0, WIDTH);
    queue_products<WIDTH, STAGE, WIDTH>(part, t);
  }
  t.ring.passed(STAGE);
  const bool last = ++t.step == t.steps;
  // The wait for the next stage is under the products, so that it is not between the promotion and the next ones.
  if (!last) barrier_wait(t.s.full + NEXT * 8, t.ring.parity(NEXT));
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  hold<WIDTH / 2>(part);
  t.s.give_back(STAGE);
  scales.promote(sum, part);
  return last;
}

// A step of narrow tiles: the products of stage STAGE are under way; those of the next stage, unless this is the LAST
// step, go behind them and run under the promotion.
template <int WIDTH, int STAGE, bool LAST>
__device__ __forceinline__ void multiply_ahead(float* sum, float* part, float* next, Steps& t) {
  constexpr int NEXT = (STAGE + 1) % STAGES;
  Scales<WIDTH> scales;
  scales.load(t.at_a, STAGE, t.at_b + t.step * 4, t.steps, t.first);
  t.ring.passed(STAGE);
  if constexpr (!LAST) {
    barrier_wait(t.s.full + NEXT * 8, t.ring.parity(NEXT));
    queue_products<WIDTH, NEXT>(next, t);
  }
  if constexpr (LAST) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  else asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  hold<WIDTH / 2>(part);
  t.s.give_back(STAGE);
  scales.promote(sum, part);
}

// One tile of WIDTH columns. row: this thread's first row in the tile. first: columns before the second scale of b.
template <int WIDTH>
__device__ __forceinline__ void multiply_tile(float* sum, Ring& ring, const Shared& s, u32 at_b, int steps, int part_no,
                                              int row, int first) {
  constexpr int HALVES = WIDTH > 192 ? 2 : 1;  // registers hold the sums of both and the products of one
  float part[WIDTH / HALVES / 2];
#pragma unroll
  for (int i = 0; i < WIDTH / 2; i++) sum[i] = 0.0f;
  if (SPLIT > 1 && steps == 0) return __syncwarp();  // no wgmma keeps the lanes together
  Steps t{s, ring, low_word(s.a + part_no * A_BOX), low_word(s.b), s.scale_a + row * 4, at_b, 0, steps, first};
  // Written out, because compilers do not unroll loops that end in the middle.
  // (A step that says whether it was the last would have the compiler take products under way for ready ones.)
#define STEP(i)                                                                      \
  if constexpr (i < STAGES && !AHEAD) {                                              \
    if (multiply_step<WIDTH / HALVES, HALVES, i % STAGES>(sum, part, t)) break;      \
  } else if constexpr (i < STAGES) {                                                 \
    float *const now = i % 2 ? odd : part, *const next = i % 2 ? part : odd;         \
    if (t.step + 1 == steps) {                                                       \
      multiply_ahead<WIDTH, i % STAGES, true>(sum, now, next, t);                    \
      break;                                                                         \
    }                                                                                \
    multiply_ahead<WIDTH, i % STAGES, false>(sum, now, next, t);                     \
    t.step++;                                                                        \
  }
  constexpr bool AHEAD = BLOCK_N <= 64 && WIDTH == BLOCK_N;
  float odd[AHEAD ? WIDTH / 2 : 1];
  if constexpr (AHEAD) queue_products<WIDTH, 0>(part, t);
  for (;;) {
    STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
  }
#undef STEP
}
