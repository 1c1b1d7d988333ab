// A ring of stages and a tile's products from it, for CUDA C++ kernels of 16-bit operands. `Stage` says how a stage lies:
// COUNT, of stages; A_BYTES, B_BYTES, of one; PART, bytes from 64 rows of a to the next; A_NEXT, B_NEXT, units of 16 bytes
// from one wgmma's 16 summands to the next; COPIED, whether cp.async brings an operand; UNIFORM, whether descriptors are
// kept in uniform registers.

template <int COUNT>
struct Ring {
  int stage, parity;
  __device__ __forceinline__ void advance() {
    if (++stage == COUNT) { stage = 0; parity ^= 1; }
  }
  __device__ __forceinline__ void skip(int steps) {
    const int rounds = quotient(stage + steps, COUNT);
    stage += steps - rounds * COUNT;
    parity ^= rounds & 1;
  }
};

// sum[i] = 64 rows of a, part i, times WIDTH columns of b, by a consumer warpgroup. full, empty: the barriers of the first
// stage. next: the barrier at which another consumer waits for its turn, or 0.
template <class Stage, int WIDTH, int PARTS>
__device__ __forceinline__ void multiply_tile(float (&sum)[PARTS][WIDTH / 2], Ring<Stage::COUNT>& ring, u32 full, u32 empty,
                                              u32 a, u32 b, int steps, u32 next) {
  const int lane = threadIdx.x % LANES;
#pragma unroll
  for (int i = 0; i < PARTS; i++)
#pragma unroll
    for (int j = 0; j < WIDTH / 2; j++) sum[i][j] = 0.0f;
  u32 before = 0;
  for (int step = 0; step < steps; step++) {
    barrier_wait(full + ring.stage * 8, ring.parity);
    // cp.async writes through the generic proxy, wgmma reads through the asynchronous one.
    if (Stage::COPIED) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
    for (int i = 0; i < PARTS; i++) hold<WIDTH / 2>(sum[i]);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    u32 at_a = a + ring.stage * (Stage::A_BYTES / 16), at_b = b + ring.stage * (Stage::B_BYTES / 16);
    if (Stage::UNIFORM) at_a = uniform(at_a), at_b = uniform(at_b);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int i = 0; i < PARTS; i++)
        multiply(Columns<WIDTH>(), sum[i], at_a + i * (Stage::PART / 16) + k * Stage::A_NEXT, at_b + k * Stage::B_NEXT);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    // The products of the step before are done, and its stage is free.
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (step && lane == 0) barrier_arrive(before);
    before = empty + ring.stage * 8;
    ring.advance();
  }
  if (next && lane == 0) barrier_arrive(next);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < PARTS; i++) hold<WIDTH / 2>(sum[i]);
  __syncwarp();
  if (steps && lane == 0) barrier_arrive(before);
}

// Give back the stages of a tile of which a consumer has no rows.
template <int COUNT>
__device__ __forceinline__ void pass_tile(Ring<COUNT>& ring, u32 full, u32 empty, int steps) {
  for (int step = 0; step < steps; step++) {
    barrier_wait(full + ring.stage * 8, ring.parity);
    __syncwarp();  // no lane must miss what another gives back
    if (threadIdx.x % LANES == 0) barrier_arrive(empty + ring.stage * 8);
    ring.advance();
  }
}
