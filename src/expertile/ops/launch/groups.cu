// Groups of rows and their tiles, for CUDA C++ kernels that count a ragged problem's tiles on the GPU.

// The sum of x over the lanes up to this one, by a warp; `lanes`: how many have one. (A loop: with it unrolled, an FP8
// product of 58 us took 1 % longer, though it runs once in a kernel and beside the products.)
__device__ __forceinline__ int summed_up(int x, int lanes) {
  const int lane = threadIdx.x % LANES;
#pragma unroll 1
  for (int d = 1; d < lanes; d *= 2) {
    const int y = __shfl_up_sync(0xffffffffu, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

// By a warp: ends[g] = units up to and including those of group g, row_ends[g] = its last row + 1, which `row_end(g)`
// says. `units(rows)`: of a group of so many.
template <typename RowEnd, typename Units>
__device__ __forceinline__ void list_groups(int* ends, int* row_ends, int G, const RowEnd& row_end, const Units& units) {
  const int lane = threadIdx.x % LANES;
  int before = 0, row = 0;
  for (int base = 0; base < G; base += LANES) {
    const int g = base + lane;
    const int end = g < G ? row_end(g) : 0, beside = __shfl_up_sync(0xffffffffu, end, 1);
    const int x = summed_up(g < G ? units(end - (lane ? beside : row)) : 0, LANES);
    if (g < G) {
      ends[g] = before + x;
      row_ends[g] = end;
    }
    before += __shfl_sync(0xffffffffu, x, LANES - 1);
    row = __shfl_sync(0xffffffffu, end, LANES - 1);
  }
  __syncwarp();
}

// The group of unit t, or G past the last, by a warp.
__device__ __forceinline__ int group_of(int t, const int* ends, int G) {
  const int lane = threadIdx.x % LANES;
  int g = 0;
  for (int base = 0; base < G; base += LANES) {
    const unsigned before = __ballot_sync(0xffffffffu, base + lane < G && ends[base + lane < G ? base + lane : 0] <= t);
    g += __popc(before);
    if (before != 0xffffffffu) break;
  }
  return g;
}

// a / b for 0 <= a, 0 < b and a quotient below 2^21, in half the clocks of the compiler's division.
__device__ __forceinline__ int quotient(int a, int b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"((float)b));
  const int q = (int)((float)a * r);
  const int rest = a - q * b;
  return q + (rest >= b) - (rest < 0);
}

// Row m and column n of a tile of a group that has `tiles` rows of them, `across` in each: about `band` rows at a time,
// cut evenly, down the rows first.
struct Place { int m, n; };

__device__ __forceinline__ Place in_bands(int tile, int tiles, int across, int band_rows) {
  int bands = (tiles + band_rows / 2) / band_rows;
  if (bands <= 1) {
    const int n = quotient(tile, tiles);
    return {tile - n * tiles, n};
  }
  const int height = quotient(tiles + bands - 1, bands);
  const int band = quotient(tile, height * across), inner = tile - band * height * across;
  const int left = tiles - band * height, here = left < height ? left : height;
  const int n = quotient(inner, here);
  return {band * height + inner - n * here, n};
}

// Of the last band of those.
__device__ __forceinline__ int in_last_band(int tiles, int band_rows) {
  const int bands = (tiles + band_rows / 2) / band_rows;
  return bands <= 1 ? tiles : tiles - (bands - 1) * quotient(tiles + bands - 1, bands);
}

// The dynamic tile scheduler takes a number from `counter` for each of `units` units, by one lane; the last one sets it
// to zero again, for the next kernel.
__device__ __forceinline__ void counted(int* counter, int number, int units) {
  if (number == units - 1) *counter = 0;
}
