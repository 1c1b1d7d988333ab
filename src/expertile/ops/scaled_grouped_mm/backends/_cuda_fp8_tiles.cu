// Tiles of the `cuda_fp8` kernel: which of them a program takes, and how the scheduling warp tells the others.

constexpr int ROWS = 64 * CONSUMERS;
constexpr int EDGE = 64;  // tiles at the right edge have a multiple of so many columns, or all
enum { SHARE_NONE, SHARE_A, SHARE_B };

// width 0: there are no more tiles.
struct Tile { int group, row, row_end, col, width, share; };

// Unit number -> this program's tile. unit_ends[g]: units up to and including group g; row_ends[g]: its last row + 1.
__device__ __forceinline__ Tile locate(int t, int n_full, int rest, int rank, int G, const int* unit_ends,
                                       const int* row_ends) {
  const int across = n_full + (rest != 0), g = group_of(t, unit_ends, G);
  const int first = g ? unit_ends[g - 1] : 0;
  const int row = g ? row_ends[g - 1] : 0;
  Tile found;
  found.group = g;
  found.row_end = row_ends[g];
  const int rows = (found.row_end - row + ROWS - 1) / ROWS;
  const int tiles_m = rows / CLUSTER;
  int tile = t - first, n, m;
  if (CLUSTER == 1 || tile < tiles_m * across) {
    const Place at = in_bands(tile, tiles_m, across, GROUP_M);
    n = at.n;
    m = at.m * CLUSTER + (CLUSTER == 2 ? rank : 0);
    found.share = CLUSTER == 2 ? SHARE_B : SHARE_NONE;
  } else {
    tile -= tiles_m * across;
    n = 2 * tile + rank;
    m = rows - 1;
    found.share = 2 * tile + 1 < across ? SHARE_A : SHARE_NONE;
  }
  const bool narrow = n >= n_full && rest;  // beside the last of full tiles, a program without a tile waits for the other
  found.row = n < across ? row + m * ROWS : found.row_end;
  const int edge = (rest + EDGE - 1) / EDGE * EDGE;
  found.width = narrow && edge < BLOCK_N ? edge : BLOCK_N;
  found.col = n * BLOCK_N;
  return found;
}

// The scheduling warp finds tiles and tells the others, for whom the divisions would stand between two tiles.
__device__ __forceinline__ void send(u32 at, const Tile& t) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(t.row), "r"(t.row_end), "r"(t.col), "r"(t.width)
               : "memory");
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at + 16), "r"(t.group), "r"(t.share) : "memory");
}

__device__ __forceinline__ Tile received(u32 at) {
  Tile t;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(t.row), "=r"(t.row_end), "=r"(t.col), "=r"(t.width) : "r"(at) : "memory");
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(t.group), "=r"(t.share) : "r"(at + 16) : "memory");
  return t;
}

