// How a consumer of the `cuda_fp8` kernel stores its 64 rows of a tile. mine: its place in shared memory, OUT_BYTES.

// Results in 16 bits; or, of a split tile, the sums of the other programs' parts.
constexpr u32 OUT_BYTES = SPLIT == 1 ? (BLOCK_N + 63) / 64 * (64 * 128) : (SPLIT - 1) * (64 * BLOCK_N * 4 / SPLIT);

// A consumer's rows go to its part of shared memory, 64 columns at a time with the 128-byte swizzle, and from there by TMA;
// columns past the last 64, and the last rows of a group, which no box may exceed, 16 bytes of a row a lane.
template <int WIDTH>
__device__ __forceinline__ void store_tile(const float* sum, u32 mine, const TensorMap& out_map, char* out, long long pitch,
                                           const Tile& tile, int first, int part_no, int N) {
  const int thread = threadIdx.x % 128, lane = threadIdx.x % LANES, warp = thread / LANES;
  if (warp == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  warpgroup_sync(part_no);
  const u32 row_at = mine + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int block = 0; block < WIDTH / 16; block++) {
    const int chunk = block % 4 * 2 + lane / 16;
    const u32 to = row_at + block / 4 * (64 * 128) + ((chunk ^ lane % 8) << 4);
    store_matrices(to, sum + block * 8);
  }
  const bool boxes = first + 64 <= tile.row_end;
  if (boxes) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  warpgroup_sync(part_no);
  if (boxes && warp == 0 && elected()) {
#pragma unroll
    for (int i = 0; i < WIDTH / 64; i++)
      if (tile.col + i * 64 < N) tma_store_2d(out_map, mine + i * (64 * 128), tile.col + i * 64, first);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  if (boxes && WIDTH % 64 == 0) return;
  for (int part = boxes ? WIDTH / 64 : 0; part * 64 < WIDTH; part++) {
    const int left = WIDTH - part * 64, chunks = left < 64 ? left / 8 : 8;
    for (int i = thread; i < 64 * chunks; i += 128) {
      const int row = i / chunks, chunk = i % chunks, c = tile.col + part * 64 + chunk * 8;
      const uint4 x = load_shared_16(mine + part * (64 * 128) + row * 128 + ((chunk ^ row % 8) << 4));
      if (first + row < tile.row_end && c < N) store_16(out + (first + row) * pitch + c * 2, x);
    }
  }
}

// This program's part of a split tile's columns: its own sums and those that the other programs send. parity: of the
// tiles that this consumer has shared before.
template <int WIDTH>
__device__ __forceinline__ void store_part(const float* sum, u32 mine, u32 full, u32 empty, char* out, long long pitch,
                                           const Tile& tile, int first, int rank, u32 parity, int N) {
  constexpr int MINE = WIDTH / 2 / SPLIT;  // sums of a thread
  constexpr u32 SENT = 128 * MINE * 4;     // bytes of a consumer for each other program
  const int thread = threadIdx.x % 128, lane = threadIdx.x % LANES, warp = thread / LANES;
  mine += thread * 16;
  if (thread == 0) barrier_expect(full, (SPLIT - 1) * SENT);
  barrier_wait(empty, parity ^ 1);
#pragma unroll
  for (int to = 0; to < SPLIT; to++)
#pragma unroll
    for (int i = 0; i < MINE; i += 4)
      if (to != rank) send_16(mine + (rank - (rank > to)) * SENT + i * 512, full, to, sum + to * MINE + i);
  barrier_wait(full, parity);
  const int row = first + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < MINE; i += 4) {
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int from = 0; from < SPLIT; from++) {
      if (from == rank) {
#pragma unroll
        for (int j = 0; j < 4; j++) total[j] += sum[from * MINE + i + j];
      } else {
        const uint4 x = load_shared_16(mine + (from - (from > rank)) * SENT + i * 512);
        total[0] += __uint_as_float(x.x), total[1] += __uint_as_float(x.y);
        total[2] += __uint_as_float(x.z), total[3] += __uint_as_float(x.w);
      }
    }
    const int c = tile.col + rank * (WIDTH / SPLIT) + i * 2 + lane % 4 * 2;
    u32* to = reinterpret_cast<u32*>(out + row * pitch + c * 2);
    if (c < N && row < tile.row_end) *to = packed(total[0], total[1]);
    if (c < N && row + 8 < tile.row_end) to[2 * pitch] = packed(total[2], total[3]);
  }
  __syncwarp();
  if (lane < SPLIT && lane != rank) barrier_arrive_at(empty, lane);
}
