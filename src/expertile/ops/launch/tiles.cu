// Tiles of ROWS x BLOCK_N of a persistent CUDA C++ kernel: which of them a program takes, and how the scheduling warp
// tells the others. Macros: ROWS (64 or 128), BLOCK_N, GROUP_M, CUT (tiles of the last wave may
// be cut).

constexpr int EDGE = 64;  // tiles at the right edge have a multiple of so many columns, or all

// width 0: there are no more tiles.
struct Tile { int group, row, row_end, col, width; };

// What programs take: tiles, of which those from number `whole` on are cut into `parts` of 64 columns, or of up to 128.
// Or, without parts, tiles of 128 columns from column `col` on in the last `high` rows of tiles of `group`.
struct Units { int whole, parts, all, group, high, col; };

// The last wave has a tile for some programs only: parts of it, or tiles of 128 columns in place of 192, if there are
// programs for all of them.
__device__ __forceinline__ Units units_of(int programs, int n_full, int rest, int G, const int* tile_ends,
                                          const int* row_ends) {
  const int tiles = tile_ends[G - 1];
  if (!CUT || BLOCK_N <= 64 || BLOCK_N % 64 || tiles < programs) return {tiles, 1, tiles, 0, 0, 0};
  const int left = tiles - quotient(tiles, programs) * programs;
  const int parts = left * (BLOCK_N / 64) <= programs ? BLOCK_N / 64 : left * 2 <= programs ? 2 : 1;
  if (BLOCK_N == 192 && parts == 1) {
    const int across = n_full + (rest != 0), g = group_of(tiles - 1, tile_ends, G), row = g ? row_ends[g - 1] : 0;
    const int high = in_last_band((row_ends[g] - row + ROWS - 1) / ROWS, GROUP_M), columns = quotient(left + high - 1, high);
    const int col = (across - columns) * BLOCK_N, whole = tiles - high * columns;
    const int narrow = high * ((n_full * BLOCK_N + rest - col + 127) / 128);
    const bool fit = columns <= across && whole >= programs && narrow - high * columns + left <= programs;
    if (fit) return {whole, 0, whole + narrow, g, high, col};
  }
  return {parts > 1 ? tiles - left : tiles, parts, tiles + left * (parts - 1), 0, 0, 0};
}

// So many columns of a group's rows [row, row_end), from row m of its tiles and column col on; N: columns of the result.
__device__ __forceinline__ Tile tile_at(int group, int row, int row_end, int m, int col, int columns, int N) {
  Tile found{group, row + m * ROWS, row_end, col, min(columns, (N - col + EDGE - 1) / EDGE * EDGE)};
  if (m && found.row + 64 > row_end) found.row = row_end - 64;
  return found;
}

// Number `tile` of the tiles of a group, rows [row, row_end).
__device__ __forceinline__ Tile tile_of(int tile, int group, int row, int row_end, int n_full, int rest) {
  const Place at = in_bands(tile, (row_end - row + ROWS - 1) / ROWS, n_full + (rest != 0), GROUP_M);
  return tile_at(group, row, row_end, at.m, at.n * BLOCK_N, BLOCK_N, n_full * BLOCK_N + rest);
}

// The tile, or part of one, of a number. tile_ends[g]: tiles up to and including group g; row_ends[g]: its last row + 1.
__device__ __forceinline__ Tile locate(int unit, const Units& units, int n_full, int rest, int G, const int* tile_ends,
                                       const int* row_ends) {
  if (unit >= units.all) return {0, 0, 0, 0, 0};
  const int beyond = unit - units.whole;
  if (BLOCK_N == 192 && units.parts == 0 && beyond >= 0) {
    const int g = units.group, row = g ? row_ends[g - 1] : 0, n = quotient(beyond, units.high);
    const int m = (row_ends[g] - row + ROWS - 1) / ROWS - units.high + beyond - n * units.high;
    return tile_at(g, row, row_ends[g], m, units.col + n * 128, 128, n_full * BLOCK_N + rest);
  }
  int t = unit, part = 0;
  if (beyond >= 0) {
    t = units.whole + quotient(beyond, units.parts);
    part = beyond - (t - units.whole) * units.parts;
  }
  const int g = group_of(t, tile_ends, G);
  Tile found = tile_of(t - (g ? tile_ends[g - 1] : 0), g, g ? row_ends[g - 1] : 0, row_ends[g], n_full, rest);
  if (beyond >= 0) {
    // Past the edge: the last columns once more, with the same bits.
    const int columns = units.parts * 64 == BLOCK_N ? 64 : 128, before = min(part * columns, found.width - 64);
    found.col += before;
    found.width = min(columns, found.width - before);
  }
  return found;
}

// The first of a consumer's 64 rows. Where those of its place in the tile would go past the group's end, it takes the
// group's last 64, some of them once more and with the same bits: stores take boxes of 64. Alone where the tile was
// loaded `at_once` rows stand as they are.
__device__ __forceinline__ int first_row(const Tile& t, int part_no, int at_once) {
  const int row = t.row + part_no * 64;
  return part_no && row + 64 > t.row_end && t.row_end - t.row < at_once ? t.row_end - 64 : row;
}

// The scheduling warp finds tiles and tells the others, for whom the divisions would stand between two tiles.
__device__ __forceinline__ void send(u32 at, const Tile& t) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(t.row), "r"(t.row_end), "r"(t.col), "r"(t.width)
               : "memory");
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 16), "r"(t.group) : "memory");
}

__device__ __forceinline__ Tile received(u32 at) {
  Tile t;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(t.row), "=r"(t.row_end), "=r"(t.col), "=r"(t.width) : "r"(at) : "memory");
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(t.group) : "r"(at + 16) : "memory");
  return t;
}

// The tile of number t by a warp, where there are up to LANES groups; row_end: of the group of this lane.
__device__ __forceinline__ Tile tile_of_few(int t, int row_end, int n_full, int rest, int G) {
  const int lane = threadIdx.x % LANES, above = __shfl_up_sync(0xffffffffu, row_end, 1), row = lane ? above : 0;
  const int across = n_full + (rest != 0), mine = lane < G ? (row_end - row + ROWS - 1) / ROWS * across : 0;
  const int end = summed_up(mine, G);
  const int g = __popc(__ballot_sync(0xffffffffu, lane < G && end <= t));
  if (g == G) return {0, 0, 0, 0, 0};
  const int first = __shfl_sync(0xffffffffu, end - mine, g);
  return tile_of(t - first, g, __shfl_sync(0xffffffffu, row, g), __shfl_sync(0xffffffffu, row_end, g), n_full, rest);
}
