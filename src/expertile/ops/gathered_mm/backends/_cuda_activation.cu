// The gated activations in float32 (formulas: gathered_mm/activation.py), and gate and up in memory. ACTIVATION: the
// place in `ACTIVATIONS`; INTERLEAVED: columns of pre are (gate 0, up 0, gate 1, …), else all of gate, then all of up.

enum { SWIGLU, GEGLU, REGLU, GPT_OSS };
constexpr float GELU_SCALE = 1.5957691216057308f, GELU_CUBIC = 0.044715f, GPT_OSS_SCALE = 1.702f, GPT_OSS_LIMIT = 7.0f;

__device__ __forceinline__ float sigmoid(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + __expf(-x)));
  return y;
}

// Between the limits of gpt-oss; not a number stays none.
__device__ __forceinline__ float clamped(float x) {
  return x > GPT_OSS_LIMIT ? GPT_OSS_LIMIT : x < -GPT_OSS_LIMIT ? -GPT_OSS_LIMIT : x;
}

__device__ __forceinline__ float activate(float gate, float up) {
  if (ACTIVATION == REGLU) return (gate < 0.0f ? 0.0f : gate) * up;
  if (ACTIVATION == SWIGLU) return gate * sigmoid(gate) * up;
  if (ACTIVATION == GEGLU) return gate * sigmoid(GELU_SCALE * gate * (1.0f + GELU_CUBIC * gate * gate)) * up;
  gate = gate > GPT_OSS_LIMIT ? GPT_OSS_LIMIT : gate;
  return gate * sigmoid(GPT_OSS_SCALE * gate) * (clamped(up) + 1.0f);
}

struct Gradient { float value, gate, up; };

// f(gate, up) and the gradients of gate and up for the gradient `grad` of f.
__device__ __forceinline__ Gradient activate_backward(float gate, float up, float grad) {
  if (ACTIVATION == REGLU) {
    const float glu = gate < 0.0f ? 0.0f : gate;
    return {glu * up, gate > 0.0f ? grad * up : 0.0f, grad * glu};
  }
  if (ACTIVATION == SWIGLU) {
    const float s = sigmoid(gate), glu = gate * s;
    return {glu * up, grad * up * fmaf(glu, 1.0f - s, s), grad * glu};
  }
  if (ACTIVATION == GEGLU) {
    const float square = gate * gate, s = sigmoid(GELU_SCALE * gate * (1.0f + GELU_CUBIC * square)), glu = gate * s;
    const float slope = s + glu * (1.0f - s) * (GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * square));
    return {glu * up, grad * up * slope, grad * glu};
  }
  const bool above = gate > GPT_OSS_LIMIT;
  const float between = clamped(up), factor = between + 1.0f;
  gate = above ? GPT_OSS_LIMIT : gate;
  const float s = sigmoid(GPT_OSS_SCALE * gate), glu = gate * s;
  const float slope = s + glu * (1.0f - s) * GPT_OSS_SCALE;
  return {glu * factor, above ? 0.0f : grad * factor * slope, between == up ? grad * glu : 0.0f};
}

// ---- eight columns of gate and up ----

// Bytes from the start of pre [R, 2 inner] to column c of gate in row `row`, and from there to the second half of eight
// columns of gate and up.
__device__ __forceinline__ long long pair_at(long long row, int inner, int c) {
  return INTERLEAVED ? (row * inner + c) * 4 : (row * 2 * inner + c) * 2;
}
__device__ __forceinline__ int pair_step(int inner) { return INTERLEAVED ? 16 : inner * 2; }

__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Two words, 16 bytes each, that hold eight columns of gate and up in memory, and those columns apart.
struct Pair { uint4 first, second; };

__device__ __forceinline__ Pair joined(const uint4& gate, const uint4& up) {
#if INTERLEAVED
  return {make_uint4(low_halves(gate.x, up.x), high_halves(gate.x, up.x), low_halves(gate.y, up.y),
                     high_halves(gate.y, up.y)),
          make_uint4(low_halves(gate.z, up.z), high_halves(gate.z, up.z), low_halves(gate.w, up.w),
                     high_halves(gate.w, up.w))};
#else
  return {gate, up};
#endif
}

// The inverse of `joined`.
__device__ __forceinline__ Pair apart(const uint4& x, const uint4& y) {
#if INTERLEAVED
  return {make_uint4(low_halves(x.x, x.y), low_halves(x.z, x.w), low_halves(y.x, y.y), low_halves(y.z, y.w)),
          make_uint4(high_halves(x.x, x.y), high_halves(x.z, x.w), high_halves(y.x, y.y), high_halves(y.z, y.w))};
#else
  return {x, y};
#endif
}
