// What cuda_machine.h declares; kernels share one library of it.
#include "cuda_machine.h"

#include <algorithm>
#include <array>
#include <cmath>

machine::Place gridDim;

namespace machine {

Cluster* cluster;
Block* block;

// ---- copies ----

static void perform(const Copy& c) {
  char* to = shared(c.to, c.size);
  memset(to, 0, c.size);
  if (c.bytes) memcpy(to, c.from, c.bytes);
  cluster->progress++;
}
void cp_async(uint32_t to, const char* from, int size, int bytes) {
  if (to % size || (bytes && reinterpret_cast<uint64_t>(from) % size)) throw Failure("cp.async not aligned");
  cluster->now->copies.push_back({to, from, size, bytes});
}
void cp_async_arrive(uint32_t bar) {
  for (auto& c : cluster->now->copies) perform(c);
  cluster->now->copies.clear();
  mbarrier_arrive(bar);
}
void cp_async_commit() {
  cluster->now->groups.emplace_back(cluster->now->copies.begin(), cluster->now->copies.end());
  cluster->now->copies.clear();
}
void cp_async_wait(int left) {
  auto& groups = cluster->now->groups;
  for (; int(groups.size()) > left; groups.pop_front())
    for (auto& c : groups.front()) perform(c);
}

template <typename Each>
void each_of_box(const Map& m, const int* at, Each each) {  // (offset in shared memory, address or null)
  uint32_t total = 1;
  for (int d = 0; d < m.rank; d++) total *= m.box[d];
  for (uint32_t i = 0; i < total; i++) {
    uint64_t address = m.base;
    bool inside = true;
    uint32_t rest = i;
    for (int d = 0; d < m.rank; d++) {
      const int64_t c = int64_t(at[d]) + rest % m.box[d];
      rest /= m.box[d];
      inside = inside && c >= 0 && c < int64_t(m.shape[d]);
      address += uint64_t(c) * (d ? m.pitches[d - 1] : uint64_t(m.itemsize));
    }
    each(i * m.itemsize, inside ? reinterpret_cast<char*>(address) : nullptr);
  }
}
void tma_load_at(uint32_t to, const Map& m, uint32_t bar, std::vector<int> at) {
  if (int(at.size()) != m.rank) throw Failure("coordinates for another map");
  if (to % 128) throw Failure("box not aligned");
  cluster->loads.push_back([=, home = block] {
    block = home;
    uint32_t bytes = 0;
    each_of_box(m, at.data(), [&](uint32_t offset, const char* from) {
      char* x = shared(m.swizzled ? swizzled(to + offset) : to + offset, m.itemsize);
      from ? (void)memcpy(x, from, m.itemsize) : (void)memset(x, 0, m.itemsize);
      bytes += m.itemsize;
    });
    Barrier& b = barrier(bar);
    b.tx -= bytes;
    settle(b);
  });
}
void tma_store_at(const Map& m, uint32_t from, std::vector<int> at) {
  each_of_box(m, at.data(), [&](uint32_t offset, char* to) {
    if (to) memcpy(to, shared(m.swizzled ? swizzled(from + offset) : from + offset, m.itemsize), m.itemsize);
  });
}
void tma_add(const void* map, uint32_t from, int x, int y) {
  const Map& m = *static_cast<const Map*>(map);
  if (m.itemsize != 4) throw Failure("sums of what is not float32");
  const int at[] = {x, y};
  each_of_box(m, at, [&](uint32_t offset, char* to) {
    if (to) *reinterpret_cast<float*>(to) += load<float>(m.swizzled ? swizzled(from + offset) : from + offset);
  });
}

// ---- warps ----

const uint64_t* meet(uint64_t mine) {
  Warp& w = block->warps[cluster->now->thread / WARP];
  const uint64_t meeting = w.meeting;
  w.values[meeting & 1][lane()] = mine;
  if (++w.arrived == WARP) w.arrived = 0, w.meeting++;
  wait_until([&] { return w.meeting != meeting; });
  return w.values[meeting & 1];
}
void stmatrix(bool turned, uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t x[] = {a, b, c, d};
  uint32_t rows[WARP];
  const uint64_t* all = meet(at);
  for (int i = 0; i < WARP; i++) rows[i] = all[i];
  const int row = lane() / 4, column = lane() % 4 * 2;
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 2; j++) {
      const uint16_t half = x[i] >> 16 * j;
      const uint32_t to = turned ? rows[i * 8 + column + j] + row * 2 : rows[i * 8 + row] + (column + j) * 2;
      memcpy(shared(to, 2), &half, 2);
    }
  meet(0);
}

// ---- tensor cores ----

static float fp8_to_float(uint8_t x) {  // e4m3
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return x & 0x80 ? -size : size;
}
static const std::array<float, 256> FP8 = [] {
  std::array<float, 256> all;
  for (int x = 0; x < 256; x++) all[x] = fp8_to_float(x);
  return all;
}();
// All summands of row or column i of an operand whose descriptor's low word is `word`, with the 128-byte swizzle, which
// leaves 16 bytes together.
static void values(const Product& p, uint32_t word, int turned, int i, float* to) {
  const uint32_t start = (word & 0x3FFF) << 4, apart = (word >> 16 & 0x3FFF) << 4;
  if (turned) {
    const uint32_t at = start + i / 64 * apart + i % 64 * 2;
    for (int k = 0; k < 16; k++) to[k] = value_of(load<uint16_t>(swizzled(at + k / 8 * 1024 + k % 8 * 128)), p.half);
    return;
  }
  for (uint32_t at = start + i / 8 * 1024 + i % 8 * 128, end = at + 32; at < end; at += 16) {
    const char* from = shared(swizzled(at), 16);
    for (int k = 0; k < 16; k += p.bytes) {
      uint16_t x;
      memcpy(&x, from + k / 2 * 2, 2);
      *to++ = p.bytes == 1 ? FP8[uint8_t(from[k])] : value_of(x, p.half);
    }
  }
}
__attribute__((optimize("O3"))) static void perform(const Product& p) {
  const int warp = cluster->now->thread % 128 / WARP, row = warp * 16 + lane() / 4, column = lane() % 4 * 2;
  const int summands = 32 / p.bytes;
  float a[2][32], b[2][32];
  for (int r = 0; r < 2; r++) values(p, p.a, p.turned_a, row + 8 * r, a[r]);
  for (int n = 0; n < p.n; n += 8) {
    float sums[4] = {};
    float* to = p.sum + n / 2;
    if (p.more) memcpy(sums, to, sizeof sums);
    for (int j = 0; j < 2; j++) values(p, p.b, p.turned_b, n + column + j, b[j]);
    for (int k = 0; k < summands; k++)
      for (int i = 0; i < 4; i++) sums[i] += a[i / 2][k] * b[i % 2][k];
    memcpy(to, sums, sizeof sums);
  }
  cluster->progress++;
}
void wgmma(int n, int half, int turned_a, int turned_b, float* sum, uint32_t a, uint32_t b) {
  cluster->now->open.push_back({sum, a, b, n, 1, 2, half, turned_a, turned_b});
}
void wgmma_fp8(int n, int more, float* sum, uint32_t a, uint32_t b) {
  cluster->now->open.push_back({sum, a, b, n, more, 1, 0, 0, 0});
}
void wgmma_commit() {
  cluster->now->products.push_back(std::move(cluster->now->open));
  cluster->now->open.clear();
}
void wgmma_wait(int left) {
  auto& products = cluster->now->products;
  for (; int(products.size()) > left; products.pop_front())
    for (auto& p : products.front()) perform(p);
  meet(0);  // .sync.aligned: the warp goes on together
}

// ---- a launch ----

static std::function<void()>* body;
static void enter() {
  try {
    (*body)();
  } catch (const std::exception& e) {
    cluster->failure = e.what();
  }
  cluster->now->done = true;
  cluster->progress++;
  for (;;) yield();
}

void run_cluster(int first, int count, int threads, size_t smem_bytes, unsigned seed, std::function<void()> kernel) {
  Cluster here;
  cluster = &here;
  body = &kernel;
  here.random.seed(seed);
  here.blocks.resize(count);
  here.fibers.resize(count * threads);
  std::vector<int> order(here.fibers.size());
  for (int n = 0; n < count; n++) {
    Block& b = here.blocks[n];
    b.index = first + n;
    b.stale = here.random() % 2;
    b.shared.assign(smem_bytes, char(0xFF));
    b.barriers.resize(smem_bytes / 8 + 1);
    b.warps.resize(threads / WARP);
    b.waiting.assign(16, 0);
    b.passed.assign(16, 0);
    for (int i = 0; i < threads; i++) {
      const int number = order[n * threads + i] = n * threads + i;
      Fiber& f = here.fibers[number];
      f.block = &b;
      f.thread = i;
      f.stack.reset(new char[1 << 16]);
      getcontext(&f.context);
      f.context.uc_stack = {f.stack.get(), 0, 1 << 16};
      f.context.uc_link = nullptr;
      makecontext(&f.context, enter, 0);
    }
  }
  for (size_t left = order.size(); left;) {
    const uint64_t before = here.progress;
    std::shuffle(order.begin(), order.end(), here.random);
    for (int i : order) {
      Fiber& f = here.fibers[i];
      if (f.done) continue;
      here.now = &f;
      block = f.block;
      if (!f.ready || f.ready(f.condition)) swapcontext(&here.scheduler, &f.context);
      if (!here.failure.empty()) throw Failure(here.failure);
      left -= f.done;
      while (!here.loads.empty() && here.random() % 256 == 0) {
        std::swap(here.loads[here.random() % here.loads.size()], here.loads.back());
        auto load = std::move(here.loads.back());
        here.loads.pop_back();
        load();
      }
    }
    if (here.progress == before && here.loads.empty()) throw Failure("deadlock: no thread can go on");
  }
  if (!here.loads.empty()) throw Failure("the block ended before its loads");
}

}  // namespace machine
