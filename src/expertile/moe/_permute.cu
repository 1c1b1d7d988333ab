// The three steps of `permutation` (permute.py) for sm_90. A program has TILE slots, a warp of it GROUPS times 32 that follow
// one another. Macros: WARPS, GROUPS, LONG_IDS (ids are 64 bits wide).

constexpr int THREADS = WARPS * LANES, TILE = THREADS * GROUPS;
#if LONG_IDS
typedef long long Id;
#else
typedef int Id;
#endif

// The expert of a slot, -1 where there is none.
__device__ __forceinline__ int expert_of(const Id* ids, int slot, int slots, int experts) {
  const Id id = slot < slots ? ids[slot] : -1;
  return id >= 0 && id < experts ? (int)id : -1;
}

// counts [experts, tiles]: slots of each expert in each tile.
extern "C" __global__ void __launch_bounds__(THREADS) count_slots(const Id* ids, int* counts, int slots, int tiles, int experts) {
  extern __shared__ char memory[];
  int* found = (int*)memory;
  begin_after();
  for (int e = threadIdx.x; e < experts; e += THREADS) found[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < TILE; i += THREADS) {
    const int expert = expert_of(ids, blockIdx.x * TILE + i, slots, experts);
    if (expert >= 0) atomicAdd(found + expert, 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += THREADS) counts[(long long)e * tiles + blockIdx.x] = found[e];
}

// An expert's counts become the sums of those before them; totals [experts] the sum of all. A warp has an expert.
extern "C" __global__ void __launch_bounds__(THREADS) scan_counts(int* counts, int* totals, int tiles, int experts) {
  begin_after();
  const int expert = blockIdx.x * WARPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  if (expert >= experts) return;
  int* mine = counts + (long long)expert * tiles;
  int total = 0;
  for (int base = lane; base - lane < tiles; base += 8 * LANES) {
    int x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = base + i * LANES < tiles ? mine[base + i * LANES] : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int up = summed_up(x[i], LANES);
      if (base + i * LANES < tiles) mine[base + i * LANES] = total + up - x[i];
      total += __shfl_sync(0xffffffffu, up, LANES - 1);
    }
  }
  if (lane == 0) totals[expert] = total;
}

// before, totals: of `scan_counts`, or null for one program alone. Slots without an expert have position -1; rows and
// slots behind the last are 0.
extern "C" __global__ void __launch_bounds__(THREADS) place_slots(const Id* ids, const int* before, const int* totals, int* offs,
                                                                int* rows, int* slots_of, int* positions, int slots, int top_k,
                                                                int tiles, int experts) {
  extern __shared__ char memory[];
  int* next = (int*)memory;             // [WARPS, experts]: slots of each warp, then the row of its next one
  int* sums = next + WARPS * experts;   // [WARPS]
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, tile = blockIdx.x;
  int* mine = next + warp * experts;
  for (int i = threadIdx.x; i < WARPS * experts; i += THREADS) next[i] = 0;
  begin_after();
  int expert[GROUPS];
  const int first = tile * TILE + warp * GROUPS * LANES + lane;
#pragma unroll
  for (int i = 0; i < GROUPS; i++) expert[i] = expert_of(ids, first + i * LANES, slots, experts);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GROUPS; i++)
    if (expert[i] >= 0) atomicAdd(mine + expert[i], 1);
  __syncthreads();
  // A thread has a run of experts.
  const int run = (experts + THREADS - 1) / THREADS, low = min(threadIdx.x * run, experts), high = min(low + run, experts);
  int sum = 0;
  for (int e = low; e < high; e++)
    if (totals)
      sum += totals[e];
    else
      for (int w = 0; w < WARPS; w++) sum += next[w * experts + e];
  const int up = summed_up(sum, LANES);
  if (lane == LANES - 1) sums[warp] = up;
  __syncthreads();
  int end = up - sum, total = 0;
  for (int w = 0; w < WARPS; w++) {
    end += w < warp ? sums[w] : 0;
    total += sums[w];
  }
  for (int e = low; e < high; e++) {
    int row = totals ? end + before[(long long)e * tiles + tile] : end;
    for (int w = 0; w < WARPS; w++) {
      const int count = next[w * experts + e];
      next[w * experts + e] = row;
      row += count;
    }
    end = totals ? end + totals[e] : row;
    if (tile == 0) offs[e] = end;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const unsigned same = __match_any_sync(0xffffffffu, expert[i]);
    const int rank = __popc(same & ((1u << lane) - 1)), slot = first + i * LANES;
    const int row = expert[i] < 0 ? -1 : mine[expert[i]] + rank;
    __syncwarp();
    if (row >= 0 && rank == 0) mine[expert[i]] += __popc(same);
    __syncwarp();
    if (slot < slots) positions[slot] = row;
    if (row >= 0) {
      rows[row] = slot / top_k;
      slots_of[row] = slot;
    }
  }
  const int stop = min(slots, (tile + 1) * TILE);
  for (int row = (total < tile * TILE ? tile * TILE : total) + threadIdx.x; row < stop; row += THREADS) rows[row] = slots_of[row] = 0;
}
