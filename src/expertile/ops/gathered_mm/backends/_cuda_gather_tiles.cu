// Tiles of the `cuda_gather` kernel: where they lie, which of them a program takes, and how all its warps learn of them.

#define GATED 1
#define BACKWARD 2

constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, COLUMNS = 256, PRODUCERS = 64;  // threads
// FINISHERS: epilogue warps. Beside four of them two warps are idle: registers are divided by warps in fours.
constexpr int THREADS = FINISHERS == 2 ? 384 : 512, CONSUMER_REGISTERS = FINISHERS == 2 ? 200 : 160;
constexpr int OTHER_REGISTERS = FINISHERS == 2 ? 104 : 96;
// Columns of a wgmma: one of 256 wants more than the 128 registers that 512 threads have at launch.
constexpr int WIDTH = FINISHERS == 2 ? 256 : 128;
constexpr u32 BLOCK_BYTES = 64 * 64 * 2;  // 64 rows or columns of a stage, 64 x 64 products
// Rows of pre for the epilogue warps of BACKWARD, in pairs, 32 bytes a lane: so many, and so many ahead.
constexpr int DEPTH = FINISHERS == 2 ? 3 : 2, AHEAD = 2;
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

  // Tile number -> tile, by a warp.
  __device__ __forceinline__ Tile locate(int t) const {
    if (t >= tile_ends[G - 1]) return {-1, 0, 0, 0};  // as `counted` counts them, whatever the row ends say
    const int g = group_of(t, tile_ends, G);
    const int row = g ? row_ends[g - 1] : 0, end = row_ends[g];
    const Place at = in_bands(t - (g ? tile_ends[g - 1] : 0), (end - row + ROWS - 1) / ROWS, across, BAND);
    return {g, row + at.m * ROWS, end, at.n * ACROSS};
  }
};

// The first warp counts the groups' tiles; all threads meet behind it.
__device__ __forceinline__ Groups count_tiles(int* lists, const int* offs, int G, int columns) {
  const int across = (columns + ACROSS - 1) / ACROSS;
  if (threadIdx.x < LANES)
    list_groups(lists, lists + G, G, [=](int g) { return offs[g]; },
                [=](int rows) { return (rows + ROWS - 1) / ROWS * across; });
  return Groups{lists, lists + G, G, across};
}
