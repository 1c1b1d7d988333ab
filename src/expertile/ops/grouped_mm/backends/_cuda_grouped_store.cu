// What the `cuda_grouped` kernel does with a tile's sums: bias, gated activation, and the way to memory.

constexpr u32 BLOCK_BYTES = 64 * 128;   // 64 rows of 64 summands, or the reverse; a piece of the result
constexpr int PIECE = 128 / OUT_BYTES;  // columns of a piece of 64 rows

// Where results go: `out`, rows of N columns, `pitch` bytes apart, and its map.
struct Result {
  const TensorMap* map;
  char* out;
  long long pitch;
  int N;
};

// GATED: act, and gate and up of pre, or all of it where INTERLEAVED.
struct Outputs {
  Result out, pre, pre_up;
  const char* bias;
  int M, N;
};

// Two elements of a group's bias.
__device__ __forceinline__ float2 bias_pair(const Outputs& o, int group, int column) {
  const char* from = o.bias + ((long long)group * o.N + column) * BIAS;
#if BIAS == 4
  return *reinterpret_cast<const float2*>(from);
#else
  return unpacked(*reinterpret_cast<const u32*>(from));
#endif
}

template <int WIDTH>
__device__ __forceinline__ void add_bias(float* sum, const Outputs& o, const Tile& tile) {
#if BIAS
#pragma unroll
  for (int n = 0; n < WIDTH / 8; n++) {
    float2 x = make_float2(0.0f, 0.0f);
#if GATED
    const int up = n >= WIDTH / 16, c = tile.col / 2 + n % (WIDTH / 16) * 8 + threadIdx.x % 4 * 2;
    if (2 * c < o.N) {
#if INTERLEAVED
      const float2 first = bias_pair(o, tile.group, 2 * c), second = bias_pair(o, tile.group, 2 * c + 2);
      x = up ? make_float2(first.y, second.y) : make_float2(first.x, second.x);
#else
      x = bias_pair(o, tile.group, c + up * (o.N / 2));
#endif
    }
#else
    const int c = tile.col + n * 8 + threadIdx.x % 4 * 2;
    if (c < o.N) x = bias_pair(o, tile.group, c);
#endif
    sum[n * 4] += x.x, sum[n * 4 + 1] += x.y, sum[n * 4 + 2] += x.x, sum[n * 4 + 3] += x.y;
  }
#endif
}

// How a thread's results are written to a piece in shared memory: COLUMNS of them from column `from` on.
struct AsTheyAre {
  const float* sum;
  template <int COLUMNS>
  __device__ __forceinline__ void write(u32 place, int from) const {
    store_sums<COLUMNS>(place, sum + from / 2);
  }
};

// Columns of gate and up in turn, of eight of each 16.
struct InTurn {
  const float *gate, *up;
  template <int COLUMNS>
  __device__ __forceinline__ void write(u32 place, int from) const {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x % 128 / LANES;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int row = warp * 16 + lane / 4 + j / 2 * 8, chunk = i * 2 + lane % 4 / 2, at = (from / 16 + i) * 4 + j;
        const u32 to = place + row * 128 + ((chunk ^ row % 8) << 4) + lane % 2 * 8 + j % 2 * 4;
        store_shared(to, __uint_as_float(packed(gate[at], up[at])));
      }
  }
};

// In float32, of the first `skip` rows of 64 zeros.
struct Float32 {
  const float* sum;
  int skip;
  template <int COLUMNS>
  __device__ __forceinline__ void write(u32 place, int from) const {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x % 128 / LANES;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int row = warp * 16 + lane / 4 + j * 8, chunk = i * 2 + lane % 4 / 2;
        const float* x = sum + from / 2 + i * 4 + j * 2;
        const bool any = !ADD || row >= skip;
        store_shared_pair(place + row * 128 + ((chunk ^ row % 8) << 4) + lane % 2 * 8, any ? x[0] : 0.0f, any ? x[1] : 0.0f);
      }
  }
};

// 64 rows go to memory in pieces of PIECE columns through STORE_SLOTS places of shared memory, by TMA; what is narrower
// than a piece, and the last rows of a small group, which no box may exceed, 16 bytes of a row a lane. col0: the first
// of WIDTH columns.
template <int WIDTH, class Results>
__device__ __forceinline__ void store_rows(const Results& results, u32 mine, const Result& o, int col0, int row_end,
                                           int first, int consumer, int& piece) {
  const int thread = threadIdx.x % 128, warp = thread / LANES;
  const bool whole = first + 64 <= row_end;
#pragma unroll
  for (int from = 0; from < WIDTH; from += PIECE) {
    constexpr int LAST = WIDTH % PIECE ? WIDTH % PIECE : PIECE;
    const int columns = from + PIECE <= WIDTH ? PIECE : LAST, col = col0 + from;
    const u32 place = mine + piece * BLOCK_BYTES;
    if (warp == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(STORE_SLOTS - 1) : "memory");
    warpgroup_sync(consumer);
    if (columns == PIECE) results.template write<PIECE>(place, from);
    else results.template write<LAST>(place, from);
    const bool box = whole && columns == PIECE;
    if (box) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    warpgroup_sync(consumer);
    if (warp == 0 && elected()) {
      if (box && col < o.N) ADD ? tma_add_2d(*o.map, place, col, first) : tma_store_2d(*o.map, place, col, first);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    if (!box && !ADD) {  // where results are added all pieces are whole
      constexpr int CHUNK = 16 / OUT_BYTES;
      const int chunks = columns / CHUNK;
      for (int i = thread; i < 64 * chunks; i += 128) {
        const int row = i / chunks, chunk = i % chunks, c = col + chunk * CHUNK;
        const uint4 x = load_shared_16(place + row * 128 + ((chunk ^ row % 8) << 4));
        if (first + row < row_end && c < o.N) store_16(o.out + (first + row) * o.pitch + c * OUT_BYTES, x);
      }
    }
    if (++piece == STORE_SLOTS) piece = 0;
  }
}

// 64 rows of a tile's results.
template <int WIDTH>
__device__ __forceinline__ void finish(float* sum, u32 mine, const Outputs& o, const Tile& tile, int part, int first,
                                       int consumer, int& piece) {
  add_bias<WIDTH>(sum, o, tile);
#if GATED
  constexpr int HALF_WIDTH = WIDTH / 2;
  float* up = sum + HALF_WIDTH / 2;
  const int col = tile.col / 2;
#if SAVE_PRE && INTERLEAVED
  store_rows<WIDTH>(InTurn{sum, up}, mine, o.pre, tile.col, tile.row_end, first, consumer, piece);
#elif SAVE_PRE
  store_rows<HALF_WIDTH>(AsTheyAre{sum}, mine, o.pre, col, tile.row_end, first, consumer, piece);
  store_rows<HALF_WIDTH>(AsTheyAre{up}, mine, o.pre_up, col, tile.row_end, first, consumer, piece);
#endif
#pragma unroll
  for (int i = 0; i < HALF_WIDTH / 2; i += 2) {
    const float2 x = unpacked(packed(sum[i], sum[i + 1])), y = unpacked(packed(up[i], up[i + 1]));
    sum[i] = activate(x.x, y.x), sum[i + 1] = activate(x.y, y.y);
  }
  store_rows<HALF_WIDTH>(AsTheyAre{sum}, mine, o.out, col, tile.row_end, first, consumer, piece);
#elif OUT_BYTES == 4
  // A group's last rows may have been moved up over others, whose place a part begins at otherwise.
  const int above = tile.row - tile.group * o.M, place = (above + ROWS - 1) / ROWS * ROWS + part * 64;
  const int skip = ADD ? place - (first - tile.group * o.M) : 0;
  store_rows<WIDTH>(Float32{sum, skip}, mine, o.out, tile.col, tile.row_end, first, consumer, piece);
#else
  store_rows<WIDTH>(AsTheyAre{sum}, mine, o.out, tile.col, tile.row_end, first, consumer, piece);
#endif
}
