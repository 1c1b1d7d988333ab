// Device code of the `cuda_gather` backend: persistent grouped GEMM for sm_90a whose rows of a may be gathered.
//
// Tiles of 128 x 256. Two consumer warpgroups of 64 x 256 share a tile. Two producer warps keep a ring of three stages
// full, 64 summands deep: a by cp.async, 16 bytes a thread, b by TMA. Consumers leave their rounded products in shared
// memory and go on to the next tile; epilogue warps make results of them while the tensor cores multiply.
//
//   GATED     the tile's left half is gate, its right half up: act = f(gate, up), and pre where it is kept
//   BACKWARD  dpre = f'(pre) (w products), act_w = w f(pre), and the tile's part of the row sums <products, f(pre)>
//
// With MORE the products of a second pair of operands, whose rows stand in order, are added in the same sums: as more
// steps of K.
//
// cuda_gather.py puts in front: the macros (PRODUCT, ACTIVATION, INTERLEAVED, SAVE_PRE, K_MAJOR, BIAS, BAND, FINISHERS,
// HALF, MORE), multiply, the wgmma of WIDTH columns whose sums are written out, parts.cu, groups.cu, ring.cu and the
// other files that it names.

constexpr int STEP = 64;                              // summands of a stage, 128 bytes
constexpr u32 A_BYTES = ROWS * STEP * 2, B_BYTES = COLUMNS * STEP * 2;
constexpr u32 PART_BYTES = 64 * COLUMNS * 2;          // a consumer's products
constexpr int PASSES = ROWS * STEP / 8 / PRODUCERS;   // 16-byte copies of a producer for a stage
constexpr u32 STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int STAGES = 3;
constexpr int ASK = 4;                                // steps of a tile before the next one is looked up

struct Shared { u32 stages, products, pre, bias, full, empty, staged, free; Queue queue; };

// The row of a that a row of a tile is, past the group's last row that one's; rows null: they stand in order.
__device__ __forceinline__ int token_of(const int* rows, const Tile& tile, int row) {
  const int r = min(tile.row + row, tile.row_end - 1);
  return rows ? rows[r] : r;
}

// What TMA loads (of an up-projection gate and up apart), and how many summands there are.
struct Weights { const TensorMap *map, *up_map; int K; };

struct Inputs {
  Weights weights, more_weights;
  const char *a, *more, *bias;
  const int *rows;
  int* counter;  // null: program p of P takes tiles p, p + P, p + 2P, ...
  int inner;
  long long pitch;
};

__device__ __forceinline__ int steps_of(int K) { return (K + STEP - 1) / STEP; }

// One stage, from summand k on. source(i): where a thread's copy of a row's part begins. Both warps load b, half of it
// each.
template <class Source>
__device__ __forceinline__ void fill(const Shared& s, const Weights& w, const Tile& tile, const Ring<STAGES>& ring, int k,
                                     const Source& source) {
  const int thread = threadIdx.x % PRODUCERS, chunk = thread % 8, first_row = thread / 8, half = thread / LANES;
  const u32 bar = s.full + ring.stage * 8;
  const u32 a = s.stages + ring.stage * STAGE_BYTES, b = a + A_BYTES + half * (B_BYTES / 2);
  barrier_wait(s.empty + ring.stage * 8, ring.parity);
  if (elected()) {
    barrier_expect(bar, B_BYTES / 2);
#if PRODUCT == GATED
    tma_3d(b, half ? *w.up_map : *w.map, bar, k, tile.col, tile.group);
#elif K_MAJOR
    tma_3d(b, *w.map, bar, k, tile.col + half * (COLUMNS / 2), tile.group);
#else
#pragma unroll
    for (int i = 0; i < COLUMNS / 128; i++)
      tma_3d(b + i * BLOCK_BYTES, *w.map, bar, tile.col + half * (COLUMNS / 2) + i * 64, k, tile.group);
#endif
  }
  const u32 to = a + first_row * 128 + ((chunk ^ first_row % 8) << 4);
  const u32 bytes = k + chunk * 8 < w.K ? 16 : 0;
#pragma unroll
  for (int i = 0; i < PASSES; i++) copy_16(to + i * 1024, source(i), bytes);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// Bias of a tile's columns, as they lie in memory, two values a copy.
__device__ __forceinline__ void copy_bias(const Shared& s, const Inputs& in, const Tile& tile, int number) {
#if BIAS
  const int width = 2 * in.inner;
  const char* from = in.bias + (long long)tile.group * width * BIAS;
  const u32 to = s.bias + number % SLOTS * (COLUMNS * BIAS);
#pragma unroll
  for (int i = threadIdx.x % PRODUCERS * 2; i < COLUMNS; i += 2 * PRODUCERS) {
    const int c = INTERLEAVED ? 2 * tile.col + i : tile.col + i % 128;
    const bool inside = c < (INTERLEAVED ? width : in.inner);
    const int at = INTERLEAVED ? c : i / 128 * in.inner + c;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to + i * BIAS),
                 "l"(from + (inside ? at : 0) * BIAS), "n"(2 * BIAS), "r"(inside ? 2 * BIAS : 0) : "memory");
  }
#endif
}

__device__ __forceinline__ void produce(const Shared& s, const Inputs& in, const Groups& groups) {
  const int thread = threadIdx.x % PRODUCERS, lane = threadIdx.x % LANES, warp = thread / LANES;
  const int steps = steps_of(in.weights.K);
  // Copies of a thread: 16 bytes of rows first_row + 8 i. A lane asks for the row numbers of passes lane / 4 and 8 more.
  const int asked = warp * 4 + lane % 4 + lane / 4 * 8;
  Ring<STAGES> ring{0, 1};
  int t = blockIdx.x;
  if (warp == 0) s.queue.send(0, groups.locate(t));
  Tile tile = s.queue.receive(0);
  int token = 0, more = 0;
  if (tile.group >= 0) token = token_of(in.rows, tile, asked), more = token_of(in.rows, tile, asked + 64);
  for (int number = 0; tile.group >= 0; number++) {
    const char* from[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const long long row = __shfl_sync(0xffffffffu, i < 8 ? token : more, i % 8 * 4 + lane / 8);
      from[i] = in.a + row * in.pitch + lane % 8 * 16;
    }
    // The compiler would work them out again for every copy.
#pragma unroll
    for (int i = 0; i < PASSES; i++) asm volatile("" : "+l"(from[i]));
    int next = t + gridDim.x;
    if (in.counter && warp == 0 && lane == 0) next = atomicAdd(in.counter, 1);
    Tile after;
    copy_bias(s, in, tile, number);
    for (int step = 0; step < steps; step++) {
      const int k = step * STEP;
      fill(s, in.weights, tile, ring, k, [&](int i) { return from[i] + k * 2; });
      ring.advance();
      if (step == ASK || (step == steps - 1 && step < ASK)) {
        if (warp == 0) {
          if (in.counter && lane == 0) counted(in.counter, next, groups.tile_ends[groups.G - 1]);
          t = __shfl_sync(0xffffffffu, next, 0) + (in.counter ? gridDim.x : 0);
          s.queue.send(number + 1, groups.locate(t));
        }
        after = s.queue.receive(number + 1);
        if (after.group >= 0) token = token_of(in.rows, after, asked), more = token_of(in.rows, after, asked + 64);
      }
    }
#if MORE
    const int pitch = in.more_weights.K * 2, last = tile.row_end - 1 - tile.row;
    for (int step = 0; step < steps_of(in.more_weights.K); step++) {
      const int k = step * STEP;
      const char* rows = in.more + (long long)tile.row * pitch + (k + lane % 8 * 8) * 2;
      fill(s, in.more_weights, tile, ring, k, [&](int i) { return rows + min(thread / 8 + i * 8, last) * pitch; });
      ring.advance();
    }
#endif
    tile = after;
  }
}

// A value of the bias: float32, or 16 bits wide as the products are.
__device__ __forceinline__ float bias_value(u32 at) {
  if (BIAS == 4) return load_shared(at);
  unsigned short x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
  return unpacked(x).x;
}

__device__ __forceinline__ void add_bias(float* sum, u32 bias) {
#if BIAS
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < COLUMNS / 8; n++) {
    float2 x;
#if INTERLEAVED
    // Gate and up of a column lie side by side.
    const u32 at = bias + ((n % 16 * 8 + column) * 2 + n / 16) * BIAS;
    x = make_float2(bias_value(at), bias_value(at + 2 * BIAS));
#else
    const u32 at = bias + (n * 8 + column) * BIAS;
    x = make_float2(bias_value(at), bias_value(at + BIAS));
#endif
    sum[n * 4] += x.x, sum[n * 4 + 1] += x.y, sum[n * 4 + 2] += x.x, sum[n * 4 + 3] += x.y;
  }
#endif
}

__device__ __forceinline__ void consume(const Shared& s, int consumer, int steps) {
  const int lane = threadIdx.x % LANES;
  const u32 a = low_word(s.stages + consumer * BLOCK_BYTES);
  const u32 b = K_MAJOR ? low_word(s.stages + A_BYTES) : block_word(s.stages + A_BYTES, BLOCK_BYTES);
  Ring<STAGES> ring{0, 0};
  for (int number = 0;; number++) {
    const Tile tile = s.queue.receive(number);
    if (tile.group < 0) break;
    const bool any = tile.row + consumer * 64 < tile.row_end;
    float sum[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) sum[i] = 0.0f;
    if (any) {
      u32 before = 0;
      for (int step = 0; step < steps; step++) {
        barrier_wait(s.full + ring.stage * 8, ring.parity);
        // cp.async writes through the generic proxy, wgmma reads through the asynchronous one.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        hold<COLUMNS / 2>(sum);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u32 further = ring.stage * (STAGE_BYTES / 16);
#pragma unroll
        for (int k = 0; k < STEP / 16; k++)
#pragma unroll
          for (int c = 0; c < COLUMNS; c += WIDTH)
            multiply(Columns<WIDTH>(), sum + c / 2, a + further + k * 2, b + further + k * (K_MAJOR ? 2 : 128) + c * 8);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The products of the step before are done, and its stage is free.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step && lane == 0) barrier_arrive(before);
        before = s.empty + ring.stage * 8;
        ring.advance();
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      hold<COLUMNS / 2>(sum);
      if (lane == 0) barrier_arrive(before);
      add_bias(sum, s.bias + number % SLOTS * (COLUMNS * BIAS));
    } else {
      pass_tile(ring, s.full, s.empty, steps);
    }
    barrier_wait(s.free + consumer * 8, ~number & 1);
    if (any) store_sums<COLUMNS>(s.products + consumer * PART_BYTES, sum);
    __syncwarp();
    if (lane == 0) barrier_arrive(s.staged + consumer * 8);
  }
}

__device__ __forceinline__ void finish_tiles(const Shared& s, const Outputs& o) {
  for (int number = 0;; number++) {
    const Tile tile = s.queue.receive(number);
    if (tile.group < 0) break;
    const Ahead ahead = start(o, tile, s.pre);
#pragma unroll 1
    for (int part = 0; part < CONSUMERS; part++) {
      barrier_wait(s.staged + part * 8, number & 1);
      finish(o, tile, ahead, part, s.products + part * PART_BYTES);
      __syncwarp();
      if (threadIdx.x % LANES == 0) barrier_arrive(s.free + part * 8);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gathered_mm(const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap up_map,
#if MORE
            const __grid_constant__ TensorMap more_map, const __grid_constant__ TensorMap more_up_map, const char* more,
            int rank,
#endif
            const char* a, const int* rows, const int* offs, const char* bias, const int* slots, const float* weights,
            char* out, char* pre, char* dpre, float* sums, int* counter, int G, int R, int K, int inner, long long pitch) {
  extern __shared__ __align__(1024) char memory[];
  u32 at;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(at) : "l"(memory));
  Shared s;
  s.stages = at;
  s.products = s.stages + STAGES * STAGE_BYTES;
  s.pre = s.products + CONSUMERS * PART_BYTES;
  s.bias = s.pre + FINISHERS * PRE_BYTES;
  s.queue.tiles = s.bias + SLOTS * COLUMNS * BIAS;
  s.queue.full = s.queue.tiles + SLOTS * 16;
  s.full = s.queue.full + SLOTS * 8;
  s.empty = s.full + STAGES * 8;
  s.staged = s.empty + STAGES * 8;
  s.free = s.staged + CONSUMERS * 8;
  int* lists = reinterpret_cast<int*>(memory + (s.free + CONSUMERS * 8 - at));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.full + i * 8, PRODUCERS + PRODUCERS / LANES);
      barrier_init(s.empty + i * 8, 4 * CONSUMERS);
    }
    for (int i = 0; i < SLOTS; i++) barrier_init(s.queue.full + i * 8, 1);
    for (int i = 0; i < CONSUMERS; i++) {
      barrier_init(s.staged + i * 8, 4);
      barrier_init(s.free + i * 8, FINISHERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const Groups groups = count_tiles(lists, offs, G, inner);
  __syncthreads();
#if MORE
  const Weights second{&more_map, &more_up_map, rank};
#else
  const Weights second{};
  const char* more = nullptr;
#endif
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / LANES, 0);
  if (warp < 4 * CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(s, warp / 4, steps_of(K) + steps_of(second.K));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
    if (warp < 4 * CONSUMERS + PRODUCERS / LANES)
      produce(s, Inputs{{&b_map, &up_map, K}, second, a, more, bias, rows, counter, inner, pitch}, groups);
    else if (FINISHERS == 2 || warp < 4 * CONSUMERS + PRODUCERS / LANES + FINISHERS)
      finish_tiles(s, Outputs{out, pre, dpre, weights, slots, sums, R, inner});
  }
}
