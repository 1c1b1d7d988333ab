// Tiles of the `cuda_gather` kernel: where they lie, which of them a program takes, and how all its warps learn of them.

#define MM 0
#define GATED 1
#define BACKWARD 2

constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, COLUMNS = 256, PRODUCERS = 64;  // threads
constexpr int FINISHERS = 2;  // epilogue warps
constexpr u32 BLOCK_BYTES = 64 * 64 * 2;  // 64 rows or columns of a stage, 64 x 64 products
// Rows of pre for the epilogue warps of BACKWARD, in pairs, 32 bytes a lane.
constexpr int DEPTH = 3;
constexpr u32 PLANE_BYTES = LANES * 16, PRE_BYTES = PRODUCT == BACKWARD ? DEPTH * 4 * PLANE_BYTES : 0;  // of a warp
constexpr int ACROSS = PRODUCT == GATED ? COLUMNS / 2 : COLUMNS;  // columns of the results

// Tiles that the queue holds. A producer that looks up tile n + 1 has filled a stage of tile n, so consumers have done
// their part of a tile no more than three before, and the epilogue of one no more than two before that.
constexpr int SLOTS = 8;

// group -1: there are no more tiles.
struct Tile { int group, row, row_end, col; };

struct Queue {
  u32 tiles, full;
  // By a warp; `number` counts this program's tiles.
  __device__ __forceinline__ void send(int number, const Tile& t) const {
    if (threadIdx.x % LANES == 0) {
      const u32 slot = number % SLOTS;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tiles + slot * 16), "r"(t.group), "r"(t.row),
                   "r"(t.row_end), "r"(t.col) : "memory");
      barrier_arrive(full + slot * 8);
    }
    __syncwarp();
  }
  __device__ __forceinline__ Tile receive(int number) const {
    const u32 slot = number % SLOTS;
    barrier_wait(full + slot * 8, number / SLOTS & 1);
    Tile t;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(t.group), "=r"(t.row), "=r"(t.row_end), "=r"(t.col) : "r"(tiles + slot * 16) : "memory");
    return t;
  }
};

struct Groups {
  const int *tile_ends, *row_ends;  // in shared memory: tiles up to and including a group's, its last row + 1
  int G, across;

  // Tile number -> tile, by a warp. About BAND rows of tiles at a time, cut evenly, down the rows first.
  __device__ __forceinline__ Tile locate(int t) const {
    const int lane = threadIdx.x % LANES;
    int g = 0;
    for (int base = 0; base < G; base += LANES) {
      const unsigned before =
          __ballot_sync(0xffffffffu, base + lane < G && tile_ends[base + lane < G ? base + lane : 0] <= t);
      g += __popc(before);
      if (before != 0xffffffffu) break;
    }
    Tile found;
    if (g == G) {
      found.group = -1, found.row = found.row_end = found.col = 0;
      return found;
    }
    const int row = g ? row_ends[g - 1] : 0, tile = t - (g ? tile_ends[g - 1] : 0);
    const int tiles = (row_ends[g] - row + ROWS - 1) / ROWS;
    int bands = (tiles + BAND / 2) / BAND;
    bands = bands < 1 ? 1 : bands;
    const int height = (tiles + bands - 1) / bands;
    const int band = tile / (height * across), inner = tile - band * height * across;
    const int left = tiles - band * height, here = left < height ? left : height;
    const int n = inner / here;
    found.group = g;
    found.row = row + (band * height + inner - n * here) * ROWS;
    found.row_end = row_ends[g];
    found.col = n * ACROSS;
    return found;
  }

};

// The first warp counts the groups' tiles; all threads meet behind it.
__device__ __forceinline__ Groups list_groups(int* lists, const int* offs, int G, int columns) {
  const int across = (columns + ACROSS - 1) / ACROSS;
  int *tile_ends = lists, *row_ends = lists + G;
  if (threadIdx.x < LANES) {
    const int lane = threadIdx.x;
    int tiles = 0;
    for (int base = 0; base < G; base += LANES) {
      const int g = base + lane;
      const int end = g < G ? offs[g] : 0, begin = g < G && g ? offs[g - 1] : 0;
      int x = g < G ? (end - begin + ROWS - 1) / ROWS * across : 0;
#pragma unroll
      for (int d = 1; d < LANES; d *= 2) {
        const int y = __shfl_up_sync(0xffffffffu, x, d);
        if (lane >= d) x += y;
      }
      if (g < G) {
        tile_ends[g] = tiles + x;
        row_ends[g] = end;
      }
      tiles += __shfl_sync(0xffffffffu, x, LANES - 1);
    }
  }
  return Groups{tile_ends, row_ends, G, across};
}
