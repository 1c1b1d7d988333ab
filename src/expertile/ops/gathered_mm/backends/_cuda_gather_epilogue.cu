// What the epilogue warps of the `cuda_gather` kernel make of a consumer's products, its part of the tile.

constexpr int HEIGHT = 64 / FINISHERS;  // rows of a part for an epilogue warp

struct Outputs {
  char *out, *pre, *dpre;  // out: act, act_w
  const float* weights;
  const int* slots;
  float* sums;
  int rows, inner;  // R, I
};

// Eight products of a row of a part, from column 8 * chunk on.
__device__ __forceinline__ uint4 products_of(u32 part, int row, int chunk) {
  return load_shared_16(part + chunk / 8 * BLOCK_BYTES + row * 128 + ((chunk % 8 ^ row % 8) << 4));
}

__device__ __forceinline__ int finisher() { return threadIdx.x / LANES % FINISHERS; }

#if PRODUCT == GATED
// Nothing is read before the products are there.
struct Ahead {};
__device__ __forceinline__ Ahead start(const Outputs&, const Tile&, u32) { return {}; }

__device__ __forceinline__ void finish(const Outputs& o, const Tile& tile, const Ahead&, int part, u32 products) {
  const int lane = threadIdx.x % LANES, chunk = lane % 16, c = tile.col + chunk * 8, top = finisher() * HEIGHT;
  const int first = tile.row + part * 64 + top, left = tile.row_end - first;
#pragma unroll 2
  for (int i = 0; i < HEIGHT / 2; i++) {
    const int r = 2 * i + lane / 16;
    const uint4 gate = products_of(products, top + r, chunk), up = products_of(products, top + r, 16 + chunk);
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
      if (SAVE_PRE) {
        char* to = o.pre + pair_at(row, o.inner, c);
        const Pair pre = joined(gate, up);
        store_16(to, pre.first);
        store_16(to + pair_step(o.inner), pre.second);
      }
    }
  }
}
#else
// A warp takes two rows at a time. It copies pre AHEAD pairs of rows ahead into shared memory, from where each lane reads
// what it has copied itself.
constexpr int PAIRS = HEIGHT / 2;  // of a part
static_assert(HEIGHT <= LANES, "a lane adds a row's sum");

// What a lane knows of its tile: its columns of act_w, pre and dpre in the first row, and the weight of a row of each
// part.
struct Ahead {
  char *act, *pre, *dpre;
  u32 pitch, step;  // bytes of a row of act_w, half of those of pre; `pair_step`
  u32 ring;
  int left;         // rows that the group has from the tile's first on
  bool inside;
  float weights[CONSUMERS];
};

// The first row, in the tile, of a pair of this warp.
__device__ __forceinline__ int row_of(int pair) {
  return pair / PAIRS * 64 + finisher() * HEIGHT + pair % PAIRS * 2;
}

__device__ __forceinline__ u32 slot_of(const Ahead& l, int pair) { return l.ring + pair % DEPTH * (4 * PLANE_BYTES); }

__device__ __forceinline__ void ask(const Ahead& l, int pair) {
  const int row = row_of(pair);
  const u32 to = slot_of(l, pair);
  if (pair < CONSUMERS * PAIRS)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool any = l.inside && row + i < l.left;
      const char* from = l.pre + (any ? (row + i) * 2 * l.pitch : 0);
      copy_16(to + 2 * i * PLANE_BYTES, from, any ? 16 : 0);
      copy_16(to + (2 * i + 1) * PLANE_BYTES, from + l.step, any ? 16 : 0);
    }
  copies_commit();
}

__device__ __forceinline__ Ahead start(const Outputs& o, const Tile& tile, u32 ring) {
  const int lane = threadIdx.x % LANES, c = tile.col + lane * 8;
  Ahead l;
  l.inside = c < o.inner;
  const int at = l.inside ? c : 0;
  const long long pair = pair_at(tile.row, o.inner, at);
  l.act = o.out + ((long long)tile.row * o.inner + at) * 2, l.pre = o.pre + pair, l.dpre = o.dpre + pair;
  l.pitch = o.inner * 2, l.step = pair_step(o.inner);
  l.ring = ring + finisher() * PRE_BYTES + lane * 16;
  l.left = tile.row_end - tile.row;
  // No copy of the tile before may come after one of this tile.
  copies_wait<0>();
#pragma unroll
  for (int pair = 0; pair < AHEAD; pair++) ask(l, pair);
#pragma unroll
  for (int part = 0; part < CONSUMERS; part++) {
    const int row = part * 64 + finisher() * HEIGHT + lane;
    l.weights[part] = lane < HEIGHT && row < l.left ? o.weights[o.slots[tile.row + row]] : 0.0f;
  }
  return l;
}

// Where a pair of rows of pre lies, once it is there.
__device__ __forceinline__ u32 arrived(const Ahead& l, int pair) {
  copies_wait<DEPTH - 1>();
  return slot_of(l, pair);
}

struct Row { u32 act[4], gate[4], up[4]; float sum; };

// Where summand j of a row lies: of 32 rows each in another bank.
__device__ __forceinline__ u32 summand_at(u32 summands, int row, int j) {
  return summands + row * 128 + (j + row) % LANES * 4;
}

// Eight columns of a row: their results, and their part of the row sum.
__device__ __forceinline__ Row gradients(const uint4& products, const uint4& first, const uint4& second, float w) {
  const Pair pre = apart(first, second);
  const u32 p[4] = {products.x, products.y, products.z, products.w};
  const u32 g[4] = {pre.first.x, pre.first.y, pre.first.z, pre.first.w};
  const u32 u[4] = {pre.second.x, pre.second.y, pre.second.z, pre.second.w};
  Row r;
  r.sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 a = unpacked(p[j]), x = unpacked(g[j]), y = unpacked(u[j]);
    const Gradient one = activate_backward(x.x, y.x, a.x * w), two = activate_backward(x.y, y.y, a.y * w);
    r.act[j] = packed(one.value * w, two.value * w);
    r.gate[j] = packed(one.gate, two.gate);
    r.up[j] = packed(one.up, two.up);
    r.sum = fmaf(a.x, one.value, fmaf(a.y, two.value, r.sum));
  }
  return r;
}

__device__ __forceinline__ void store_row(const Ahead& l, int row, const Row& r) {
  const Pair dpre = joined(make_uint4(r.gate[0], r.gate[1], r.gate[2], r.gate[3]),
                           make_uint4(r.up[0], r.up[1], r.up[2], r.up[3]));
  const bool any = l.inside && row < l.left;
  char* to = l.dpre + row * 2 * l.pitch;
  store_16_if(l.act + row * l.pitch, make_uint4(r.act[0], r.act[1], r.act[2], r.act[3]), any);
  store_16_if(to, dpre.first, any);
  store_16_if(to + l.step, dpre.second, any);
}

__device__ __forceinline__ void finish(const Outputs& o, const Tile& tile, const Ahead& l, int part, u32 products) {
  const int lane = threadIdx.x % LANES, top = finisher() * HEIGHT, first = part * 64 + top;
  const u32 summands = products + top * 128;
  const float weight = part ? l.weights[1] : l.weights[0];
#pragma unroll 1
  for (int i = 0; i < PAIRS && first + 2 * i < l.left; i++) {
    const int pair = part * PAIRS + i, row = first + 2 * i;
    if (AHEAD < DEPTH) ask(l, pair + AHEAD);
    const u32 from = arrived(l, pair);
    const uint4 a = products_of(products, top + 2 * i, lane), b = products_of(products, top + 2 * i + 1, lane);
    const uint4 pre[4] = {load_shared_16(from), load_shared_16(from + PLANE_BYTES),
                          load_shared_16(from + 2 * PLANE_BYTES), load_shared_16(from + 3 * PLANE_BYTES)};
    if (AHEAD == DEPTH) ask(l, pair + AHEAD);
    const float w = __shfl_sync(0xffffffffu, weight, 2 * i), v = __shfl_sync(0xffffffffu, weight, 2 * i + 1);
    const Row r = gradients(a, pre[0], pre[1], w), s = gradients(b, pre[2], pre[3], v);
    store_row(l, row, r);
    store_row(l, row + 1, s);
    // All lanes have read these rows' products: the first 128 bytes of each take the summands.
    __syncwarp();
    store_shared(summand_at(summands, 2 * i, lane), l.inside ? r.sum : 0.0f);
    store_shared(summand_at(summands, 2 * i + 1, lane), l.inside ? s.sum : 0.0f);
  }
  __syncwarp();
  // A row each, in one order wherever the row stands: batch-invariant.
  if (lane >= HEIGHT) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int j = 0; j < LANES; j++) sum += load_shared(summand_at(summands, lane, j));
  if (first + lane < l.left) o.sums[(long long)(tile.col / COLUMNS) * o.rows + tile.row + first + lane] = sum;
}
#endif
