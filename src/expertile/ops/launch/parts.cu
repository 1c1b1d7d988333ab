// Barriers, copies and tensor-core helpers of CUDA C++ kernels for sm_90a: thin names for PTX. Addresses of shared memory
// are 32-bit. A kernel's macros say whether results are float16 (HALF).

constexpr int LANES = 32;

struct alignas(64) TensorMap { char opaque[128]; };

// Whether this is the one lane of the warp that all its lanes agree on. Where `lane == 0` says so, ptxas, which does not
// know that one lane alone is left, makes a loop over lanes of each TMA instruction.
__device__ __forceinline__ bool elected() {
  u32 mine;
  asm volatile("{ .reg .pred mine; elect.sync _|mine, 0xffffffff; selp.u32 %0, 1, 0, mine; }" : "=r"(mine));
  return mine;
}

// x, which is the same in all lanes, as ptxas can see: so that it is kept in a uniform register. A descriptor of wgmma has
// to be in one, and what comes from an ordinary register is copied before each of them.
__device__ __forceinline__ u32 uniform(u32 x) {
  u32 y;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// Wait until the kernels before this one are done; then the kernel after it may start, and waits likewise (PDL).
__device__ __forceinline__ void begin_after() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- barriers ----

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra.uni over;\n bra.uni again;\nover:\n}" ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// At the barrier of program `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 bar, int rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(
          bar), "r"(rank) : "memory");
}

// Four numbers into program `rank` of the cluster, told to its barrier as 16 bytes. (Plain stores, and an arrival that
// releases them, take 1 us more.)
__device__ __forceinline__ void send_16(u32 to, u32 bar, int rank, const float* x) {
  asm volatile(
      "{ .reg .b32 there, told; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 told, %1, %2; "
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [told]; }" ::"r"(to),
      "r"(bar), "r"(rank), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// ---- copies ----

__device__ __forceinline__ void tma_2d(u32 to, const TensorMap& map, u32 bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(bar), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void tma_3d(u32 to, const TensorMap& map, u32 bar, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to), "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory");
}

// Into L2 only.
__device__ __forceinline__ void prefetch_2d(const TensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void prefetch_3d(const TensorMap& map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(&map), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// Of a map that `nvrtc.ragged` describes: rows [row, end) of a tensor, and zeros for rows of the box past them.
__device__ __forceinline__ void tma_ragged(u32 to, const TensorMap& map, u32 bar, int x, int row, int end) {
  constexpr int WRAP = 0x40000000;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          to), "l"(&map), "r"(bar), "r"(x), "r"(WRAP - (end - row)), "r"(end), "r"(WRAP) : "memory");
}

__device__ __forceinline__ void tma_store_2d(const TensorMap& map, u32 from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(from), "r"(x),
               "r"(y) : "memory");
}

// What lies in memory, float32, plus the box.
__device__ __forceinline__ void tma_add_2d(const TensorMap& map, u32 from, int x, int y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(from), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap& map, u32 from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(from),
               "r"(x), "r"(y), "r"(z) : "memory");
}

// 16 bytes, zeros behind the first `bytes`.
__device__ __forceinline__ void copy_16(u32 to, const char* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// A group of the copies of this thread, and the wait until no more than LEFT groups are under way.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void store_16(char* to, const uint4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// The same as `store_16` where `any`, without a branch.
__device__ __forceinline__ void store_16_if(char* to, const uint4& x, bool any) {
  asm volatile("{ .reg .pred any; setp.ne.s32 any, %5, 0; @any st.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"((int)any) : "memory");
}

// The number that L2 has by now, which a kernel that still runs may change.
__device__ __forceinline__ int load_now(const int* from) {
  int x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

__device__ __forceinline__ uint4 load_shared_16(u32 at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id + 1) : "memory"); }

__device__ __forceinline__ float load_shared(u32 at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(u32 at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

__device__ __forceinline__ void store_shared_pair(u32 at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

// ---- tensor cores ----

// The low word of the descriptor of a matrix in shared memory, K contiguous in rows of 128 bytes with the 128-byte
// swizzle: the address in units of 16 bytes. 32 summands further are 2 units. (The high word says that 8 rows make 1024
// bytes, and names the swizzle.)
__device__ __forceinline__ u32 low_word(u32 address) { return ((address & 0x3FFFF) >> 4) | 1 << 16; }

// The same where K is not contiguous: rows of K of 64 columns, 128 bytes, and `block` bytes from those to the next 64.
__device__ __forceinline__ u32 block_word(u32 address, u32 block) {
  return ((address & 0x3FFFF) >> 4) | block >> 4 << 16;
}

template <int N>
__device__ __forceinline__ void hold(float* x) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// Two results as they are stored, in float16 where HALF is 1, else in bfloat16.
__device__ __forceinline__ u32 packed(float low, float high) {
  u32 x;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#endif
  return x;
}

// A warp's 16 rows of 16 sums, eight a thread as wgmma leaves them, rounded; each lane names a place for 8 of a row.
__device__ __forceinline__ void store_matrices(u32 at, const float* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(packed(x[0], x[1])),
               "r"(packed(x[2], x[3])), "r"(packed(x[4], x[5])), "r"(packed(x[6], x[7])) : "memory");
}

// A warpgroup's 64 rows of WIDTH sums, so rounded, from `to` on: 64 columns at a time with the 128-byte swizzle.
template <int WIDTH>
__device__ __forceinline__ void store_sums(u32 to, const float* sum) {
  const int lane = threadIdx.x % LANES, warp = threadIdx.x % 128 / LANES;
  const u32 row_at = to + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int block = 0; block < WIDTH / 16; block++)
    store_matrices(row_at + block / 4 * (64 * 128) + ((block % 4 * 2 + lane / 16 ^ lane % 8) << 4), sum + block * 8);
}

// The inverse of `packed`.
__device__ __forceinline__ float2 unpacked(u32 x) {
  float2 y;
#if HALF
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }" : "=f"(y.x), "=f"(y.y) : "r"(x));
#else
  y.x = __uint_as_float(x << 16);
  y.y = __uint_as_float(x & 0xFFFF0000u);
#endif
  return y;
}
