// A machine for CUDA C++ kernels of sm_90a on the host: the threads of a cluster's blocks are fibers, run in a random order.
// `cuda_emulator.py` turns each asm statement of a kernel into a call of a function in here.
//
// What is asynchronous happens as late as the program allows, or at a random moment: cp.async when its barrier or group is
// asked for, wgmma when it is waited for, TMA loads some time later. Shared memory begins as NaN. A cluster in which nothing
// can move any more, and an access outside of shared memory, end the run with a message.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__

struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace machine {

constexpr int WARP = 32;

struct Failure : std::runtime_error { using std::runtime_error::runtime_error; };

struct Barrier { int count = 0, pending = 0, phase = 0; long tx = 0; };
struct Copy { uint32_t to; const char* from; int size, bytes; };
struct Product { float* sum; uint32_t a, b; int n, more, bytes, half, turned_a, turned_b; };

struct Map {  // what nvrtc.TensorMap holds here; dimensions from the contiguous one on
  uint64_t base;
  uint64_t pitches[4];
  uint32_t shape[5], box[5];
  int rank, itemsize, swizzled;
};

struct Warp {  // where the lanes of a warp meet
  int arrived = 0;
  uint64_t meeting = 0, values[2][WARP];
};

struct Block;

struct Fiber {
  Block* block;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  bool waited = false;  // for the kernels before
  bool (*ready)(void*) = nullptr;            // what it waits for, of `condition`; null while it can go on
  void* condition = nullptr;
  int thread = 0;
  std::deque<Copy> copies;                   // cp.async of no group yet
  std::deque<std::vector<Copy>> groups;      // committed
  std::vector<Product> open;                 // wgmma of no group yet
  std::deque<std::vector<Product>> products;
};

struct Block {
  uint32_t base = 1024 + 16;  // of shared memory: a kernel has to align it, or to declare that it wants it aligned
  int index = 0;                             // in the grid
  bool stale = false;                        // whether `ld_now` reads something else before `grid_wait`
  std::vector<char> shared;
  std::vector<Barrier> barriers;             // one for each 8 bytes of shared memory
  std::vector<Warp> warps;
  std::vector<int> waiting;                  // at bar.sync, by number
  std::vector<uint64_t> passed;
};

struct Cluster {
  std::vector<Block> blocks;
  std::vector<Fiber> fibers;
  std::vector<std::function<void()>> loads;  // TMA under way
  size_t waiting = 0;                        // at barrier.cluster
  uint64_t passed = 0, progress = 0;
  std::mt19937 random;
  ucontext_t scheduler;
  Fiber* now = nullptr;
  std::string failure;
};

extern Cluster* cluster;
extern Block* block;  // of the fiber that runs, or of the load that comes

inline void yield() { swapcontext(&cluster->now->context, &cluster->scheduler); }

template <typename Ready>
void wait_until(Ready ready) {
  if (!ready()) {  // the scheduler asks from here on
    Fiber& mine = *cluster->now;
    mine.condition = &ready;
    mine.ready = [](void* condition) { return (*static_cast<Ready*>(condition))(); };
    yield();
    mine.ready = nullptr;
  }
  cluster->progress++;
}

inline char* shared(uint32_t at, size_t size) {
  if (at < block->base || at - block->base + size > block->shared.size()) throw Failure("access outside of shared memory");
  return block->shared.data() + (at - block->base);
}
inline uint32_t swizzled(uint32_t at) { return at ^ ((at >> 7 & 7) << 4); }

// ---- barriers ----

inline Barrier& barrier(uint32_t at) {
  shared(at, 8);
  if (at % 8) throw Failure("barrier not aligned");
  return block->barriers[(at - block->base) / 8];
}
inline void settle(Barrier& b) {
  cluster->progress++;
  if (b.pending < 0) throw Failure("more arrivals than a barrier counts");
  if (b.pending == 0 && b.tx == 0) b.phase ^= 1, b.pending = b.count;
}
inline void mbarrier_init(uint32_t at, uint32_t count) { barrier(at) = {int(count), int(count), 0, 0}; }
inline void mbarrier_wait(uint32_t at, uint32_t parity) {
  wait_until([&] { return barrier(at).phase != int(parity & 1); });
}
inline void mbarrier_test(uint32_t& passed, uint32_t at, uint32_t parity) { passed = barrier(at).phase != int(parity & 1); }
inline void mbarrier_arrive(uint32_t at) {
  Barrier& b = barrier(at);
  b.pending--;
  settle(b);
}
inline void mbarrier_expect(uint32_t at, uint32_t bytes) {
  barrier(at).tx += bytes;
  mbarrier_arrive(at);
}
inline void bar_sync(uint32_t number, uint32_t threads) {
  const uint64_t before = block->passed[number];
  if (++block->waiting[number] == int(threads)) block->waiting[number] = 0, block->passed[number]++;
  wait_until([&] { return block->passed[number] != before; });
}

// What `work` does in program `rank` of the cluster.
template <typename Work>
void in_block(int rank, Work work) {
  Block* const mine = block;
  block = &cluster->blocks.at(rank);
  work();
  block = mine;
}
inline void mbarrier_arrive_at(uint32_t at, int rank) { in_block(rank, [&] { mbarrier_arrive(at); }); }
inline void st_async(uint32_t to, uint32_t bar, int rank, float x, float y, float z, float w) {
  if (to % 16) throw Failure("st.async not aligned");
  in_block(rank, [&] {
    const float sent[] = {x, y, z, w};
    memcpy(shared(to, sizeof sent), sent, sizeof sent);
    Barrier& b = barrier(bar);
    b.tx -= sizeof sent;
    settle(b);
  });
}
inline void elect(uint32_t& mine) { mine = cluster->now->thread % WARP == 0; }
inline void cluster_rank(int& rank) { rank = block - cluster->blocks.data(); }
inline void cluster_sync() {
  const uint64_t before = cluster->passed;
  if (++cluster->waiting == cluster->fibers.size()) cluster->waiting = 0, cluster->passed++;
  wait_until([&] { return cluster->passed != before; });
}

// ---- copies ----

void cp_async(uint32_t to, const char* from, int size, int bytes);
inline void cp_async_16(uint32_t to, const char* from, uint32_t bytes) { cp_async(to, from, 16, bytes); }
void cp_async_arrive(uint32_t bar);
void cp_async_commit();
void cp_async_wait(int left);
void tma_load_at(uint32_t to, const Map& m, uint32_t bar, std::vector<int> at);
void tma_store_at(const Map& m, uint32_t from, std::vector<int> at);
template <typename... Coordinates>
void tma_load(uint32_t to, const void* map, uint32_t bar, Coordinates... coordinates) {
  tma_load_at(to, *static_cast<const Map*>(map), bar, {int(coordinates)...});
}
template <typename... Coordinates>
void tma_store(const void* map, uint32_t from, Coordinates... coordinates) {
  tma_store_at(*static_cast<const Map*>(map), from, {int(coordinates)...});
}

void tma_add(const void* map, uint32_t from, int x, int y);

template <typename T>
T load(uint32_t at) {
  T x;
  memcpy(&x, shared(at, sizeof x), sizeof x);
  return x;
}
inline void ld_shared_f32(float& x, uint32_t at) { x = load<float>(at); }
inline void ld_shared_u16(unsigned short& x, uint32_t at) { x = load<unsigned short>(at); }
template <typename T>
void ld_shared_v4(T& x, T& y, T& z, T& w, uint32_t at) {
  const uint4 v = load<uint4>(at);
  x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ld_shared_b32(int& x, uint32_t at) { x = load<int>(at); }
inline void st_shared_f32(uint32_t at, float x) { memcpy(shared(at, 4), &x, 4); }
inline void st_shared_v2(uint32_t at, float x, float y) {
  const float v[2] = {x, y};
  memcpy(shared(at, 8), v, 8);
}
inline void st_shared_v4(uint32_t at, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  const uint4 v{x, y, z, w};
  memcpy(shared(at, 16), &v, 16);
}
inline void st_shared_b32(uint32_t at, int x) { memcpy(shared(at, 4), &x, 4); }
// What the kernels before may still change reads as something else, in half of the blocks.
inline void grid_wait() { cluster->now->waited = true; }
inline void ld_now(int& x, const int* from) { x = block->stale && !cluster->now->waited ? cluster->random() % 512 : *from; }
inline void ld_global_v4(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, const char* from) {
  uint4 v;
  memcpy(&v, from, 16);
  x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void st_global_v4(char* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  const uint4 v{x, y, z, w};
  memcpy(to, &v, 16);
}
inline void st_global_v4_if(char* to, uint32_t x, uint32_t y, uint32_t z, uint32_t w, int any) {
  if (any) st_global_v4(to, x, y, z, w);
}
inline void rcp(float& to, float x) { to = 1 / x; }

// ---- warps ----

inline int lane() { return cluster->now->thread % WARP; }
const uint64_t* meet(uint64_t mine);  // what all lanes of the warp brought
template <typename T>
T shuffled(T mine, int from) {
  uint64_t bits = 0;
  memcpy(&bits, &mine, sizeof mine);
  const uint64_t* all = meet(bits);
  T x;
  memcpy(&x, &all[from], sizeof x);
  return x;
}
inline void redux_or(uint32_t& x, uint32_t mine) {
  const uint64_t* all = meet(mine);
  x = 0;
  for (int i = 0; i < WARP; i++) x |= uint32_t(all[i]);
}
void stmatrix(bool turned, uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d);

// ---- numbers ----

inline float from_bits(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
inline uint32_t bits_of(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
inline float half_to_float(uint16_t x) { _Float16 h; memcpy(&h, &x, 2); return float(h); }
inline uint16_t float_to_half(float x) { _Float16 h = _Float16(x); uint16_t y; memcpy(&y, &h, 2); return y; }
inline uint16_t float_to_bf16(float x) {
  if (std::isnan(x)) return 0x7FFF;
  const uint32_t b = bits_of(x);
  return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
inline float value_of(uint16_t x, bool half) { return half ? half_to_float(x) : from_bits(uint32_t(x) << 16); }
inline void pack(bool half, uint32_t& x, float high, float low) {
  x = half ? uint32_t(float_to_half(high)) << 16 | float_to_half(low) : uint32_t(float_to_bf16(high)) << 16 | float_to_bf16(low);
}
inline void unpack_half(float& low, float& high, uint32_t x) { low = half_to_float(x), high = half_to_float(x >> 16); }

// ---- tensor cores ----

void wgmma(int n, int half, int turned_a, int turned_b, float* sum, uint32_t a, uint32_t b);
void wgmma_fp8(int n, int more, float* sum, uint32_t a, uint32_t b);
void wgmma_commit();
void wgmma_wait(int left);

inline void cvta(uint32_t& at, const void*) { at = block->base; }

// ---- a launch ----

struct Place { int x = 0; };
inline Place thread_place() { return {cluster->now->thread}; }
inline Place block_place() { return {block->index}; }

// Blocks `first` to `first` + `count` - 1 of the grid.
void run_cluster(int first, int count, int threads, size_t smem_bytes, unsigned seed, std::function<void()> kernel);

}  // namespace machine

#define threadIdx machine::thread_place()
#define blockIdx machine::block_place()
extern machine::Place gridDim;

inline int __shfl_sync(unsigned, int x, int from) { return machine::shuffled(x, from & 31); }
inline float __shfl_sync(unsigned, float x, int from) { return machine::shuffled(x, from & 31); }
inline float __shfl_xor_sync(unsigned, float x, int with) { return machine::shuffled(x, machine::lane() ^ with); }
inline int __shfl_up_sync(unsigned, int x, int by) { return machine::shuffled(x, machine::lane() < by ? machine::lane() : machine::lane() - by); }
inline unsigned __ballot_sync(unsigned, int x) {
  const uint64_t* all = machine::meet(x != 0);
  unsigned bits = 0;
  for (int i = 0; i < machine::WARP; i++) bits |= unsigned(all[i]) << i;
  return bits;
}
inline unsigned __match_any_sync(unsigned, int x) {
  const uint64_t* all = machine::meet(unsigned(x));
  unsigned bits = 0;
  for (int i = 0; i < machine::WARP; i++) bits |= unsigned(all[i] == unsigned(x)) << i;
  return bits;
}
using std::min;
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void __syncwarp() { machine::meet(0); }
inline void __syncthreads() { machine::bar_sync(0, machine::block->warps.size() * machine::WARP); }
inline int atomicAdd(int* at, int x) { const int before = *at; *at += x; return before; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __uint_as_float(unsigned x) { return machine::from_bits(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned x = 0;
  for (int i = 0; i < 4; i++) x |= unsigned(both >> 8 * (s >> 4 * i & 7) & 0xFF) << 8 * i;
  return x;
}
