// Vectors of 64 bytes and the operations on them that the kernels use.
//
// GCC's and Clang's vector extensions compile to the target's registers: one register with
// AVX-512, two with AVX2, four with NEON or SSE. Only the dot products name an instruction set.
// Compilers keep a vector that is wider than a register in memory, so inner loops are written in
// registers, PARTS of them to a vector. Knows nothing of matrices, models or threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace remora {

constexpr int LANES = 16;  // 32-bit lanes of a vector

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int16_t vh __attribute__((vector_size(32)));
typedef uint16_t vuh __attribute__((vector_size(32)));
typedef int8_t vb __attribute__((vector_size(16)));
typedef uint8_t vub __attribute__((vector_size(16)));
typedef int8_t vbytes __attribute__((vector_size(64)));

#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int PARTS = 64 / REGISTER, REGISTER_LANES = REGISTER / 4;
typedef float rf __attribute__((vector_size(REGISTER)));
typedef int32_t ri __attribute__((vector_size(REGISTER)));
typedef uint32_t ru __attribute__((vector_size(REGISTER)));
typedef uint16_t ruh __attribute__((vector_size(REGISTER / 2)));
typedef int16_t rh __attribute__((vector_size(REGISTER)));

// Rows and vectors of columns of a register tile: accumulators plus one row of operands.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, GROUPED_ROWS = 3, TILE_VECTORS = 4;
#elif defined(__aarch64__)
// Of 32 registers, 24 are sums. Totals of groups are in memory while a group is summed.
constexpr int TILE_ROWS = 3, GROUPED_ROWS = 3, TILE_VECTORS = 2;
#elif defined(__AVX2__) && !defined(__AVXVNNI__)
// Totals of groups and sums in 32 bits are in memory while products are added in 16.
constexpr int TILE_ROWS = 3, GROUPED_ROWS = 2, TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 3, GROUPED_ROWS = 1, TILE_VECTORS = 2;
#endif

constexpr int TILE_COLUMNS = TILE_VECTORS * LANES;

typedef uint16_t bf16;  // stored as the upper half of a float
struct f16 {
  uint16_t bits;  // of IEEE half precision
};

template <class V, class T>
INLINE V load(const T* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

template <class V, class T>
INLINE void store(T* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

// x - 0 is a broadcast; x + 0, which turns -0 into 0, is also an addition.
INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }
INLINE rf spread(float x) { return x - rf{}; }
INLINE ri spread(int32_t x) { return x - ri{}; }

// Broadcast the 4 bytes at `from`, of any type.
INLINE ri spread_word(const void* from) {
  int32_t word;
  __builtin_memcpy(&word, from, 4);
  return spread(word);
}

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;  // contracted on targets with FMA (-ffp-contract=fast)
#endif
}

// Where c is a product, contraction could round either one.
#if !defined(__AVX512F__)
INLINE rf fma(rf a, rf b, rf c) {
#if defined(__AVX2__)
  return (rf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (rf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The same by registers, for a `c` that is a product.
INLINE vf fma_to_product(vf a, vf b, vf c) {
  vf sum;
  UNROLL for (int part = 0; part < PARTS; part++) {
    const auto part_of = [&](const vf& x) { return load<rf>((const float*)&x + part * REGISTER_LANES); };
    store((float*)&sum + part * REGISTER_LANES, fma(part_of(a), part_of(b), part_of(c)));
  }
  return sum;
}
#endif
INLINE rf fma_to_product(rf a, rf b, rf c) { return fma(a, b, c); }

// If one argument is NaN, these return b.
#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE rf max(rf a, rf b) { return (rf)_mm256_max_ps((__m256)a, (__m256)b); }
#elif !defined(__AVX512F__)
INLINE rf max(rf a, rf b) { return a > b ? a : b; }
#endif
INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

INLINE vf min(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

INLINE vf bits_to_float(vi x) { return (vf)x; }
INLINE vi float_to_bits(vf x) { return (vi)x; }

// acc += a0 * b0 + a1 * b1 in every lane, for lanes that hold two bf16. REMORA_WIDEN_BF16: where the
// instruction for it is slower than two multiply-adds of floats (build.py). Each way has its own order
// and rounding.
INLINE rf dot_bf16(rf acc, ri a, ri b) {
#if defined(__AVX512BF16__) && !REMORA_WIDEN_BF16
  return (rf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (rf)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  const ri high = spread((int32_t)0xffff0000);
  acc = fma((rf)(a << 16), (rf)(b << 16), acc);
  return fma((rf)(a & high), (rf)(b & high), acc);
#endif
}

// acc += the sum of (u[i] - U8_ZERO) * s[i] in every lane, for lanes that hold four u8 and four s8.
// An instruction that multiplies signed bytes only takes u - 128.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int U8_ZERO = 128;
#else
constexpr int U8_ZERO = 0;
#endif

// Whether that is one instruction for a whole vector.
#if defined(__AVX512VNNI__)
constexpr bool HAS_BYTE_DOTS = true;
#else
constexpr bool HAS_BYTE_DOTS = false;
#endif

// Without one, x86 multiplies bytes into sums of two of 16 bits.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !(defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr bool HAS_BYTE_PAIRS = true;
#else
constexpr bool HAS_BYTE_PAIRS = false;
#endif

// Compilers would add the sums of an unrolled loop as a tree, with all of its products in memory.
template <class V>
INLINE V in_order(V sum) {
  asm("" : "+v"(sum));
  return sum;
}

// acc += a[i] * b[i] + a[i + 1] * b[i + 1] in every lane, of two numbers of 16 bits.
// multiply_pairs: u[i] * s[i] + u[i + 1] * s[i + 1], of u8 and s8, for every two bytes. Within 16 bits if u
// is at most 129 and s at least -127.
#if defined(__AVX512BW__)
INLINE ri add_neighbours(ri acc, ri a, ri b) {
  return in_order(acc + (ri)_mm512_madd_epi16((__m512i)a, (__m512i)b));
}
INLINE rh multiply_pairs(ri u, ri s) { return (rh)_mm512_maddubs_epi16((__m512i)u, (__m512i)s); }
#elif defined(__AVX2__)
INLINE ri add_neighbours(ri acc, ri a, ri b) {
  return in_order(acc + (ri)_mm256_madd_epi16((__m256i)a, (__m256i)b));
}
INLINE rh multiply_pairs(ri u, ri s) { return (rh)_mm256_maddubs_epi16((__m256i)u, (__m256i)s); }
#else
ri add_neighbours(ri acc, ri a, ri b);
rh multiply_pairs(ri u, ri s);
#endif

INLINE ri dot_u8s8(ri acc, ri u, ri s) {
#if defined(__AVX512VNNI__)
  return (ri)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (ri)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)u, (__m256i)s);
#elif defined(__AVX2__)
  // The even bytes and the odd ones, as pairs of 16 bits.
  acc = add_neighbours(acc, u & 0x00ff00ff, (ri)((rh)s << 8 >> 8));
  return add_neighbours(acc, (ri)((rh)u >> 8) & 0x00ff00ff, (ri)((rh)s >> 8));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (ri)vusdotq_s32((int32x4_t)acc, (uint8x16_t)u, (int8x16_t)s);
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t from_zero = (int8x16_t)(u ^ (int32_t)0x80808080);
  return (ri)vdotq_s32((int32x4_t)acc, from_zero, (int8x16_t)s);
#else
  acc += (u & 255) * ((s << 24) >> 24);
  acc += ((ri)((ru)u >> 8) & 255) * ((s << 16) >> 24);
  acc += ((ri)((ru)u >> 16) & 255) * ((s << 8) >> 24);
  return acc + (ri)((ru)u >> 24) * (s >> 24);
#endif
}

// acc += the sum of a[i] * b[i] in every lane, for lanes that hold four s8; those of b are at least -127.
// Without dot products of bytes, it takes fewer instructions than dot_u8s8.
constexpr bool HAS_SIGNED_PAIRS = HAS_BYTE_PAIRS && REGISTER == 32;
#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE ri dot_s8s8(ri acc, ri a, ri b) {
  const ri with_sign = (ri)_mm256_sign_epi8((__m256i)b, (__m256i)a);
  const rh pairs = multiply_pairs((ri)_mm256_abs_epi8((__m256i)a), with_sign);
  return add_neighbours(acc, (ri)pairs, spread(0x00010001));
}
#else
ri dot_s8s8(ri acc, ri a, ri b);
#endif

INLINE vf widen(vuh x) { return bits_to_float(__builtin_convertvector(x, vi) << 16); }
#if !defined(__AVX512F__)
INLINE rf widen(ruh x) {
#if defined(__AVX2__)
  return (rf)((ri)_mm256_cvtepu16_epi32((__m128i)x) << 16);
#else
  return (rf)(__builtin_convertvector(x, ri) << 16);
#endif
}
INLINE rf to_float(ri x) { return __builtin_convertvector(x, rf); }
#endif

// Round to the nearest bf16, ties to even. NaN stays NaN.
INLINE vuh narrow(vf x) {
#if defined(__AVX512BF16__)
  return (vuh)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  vuh result;
  UNROLL for (int half = 0; half < 2; half++) {
    const float* from = (const float*)&x + half * 8;
    const bfloat16x8_t low = vcvtq_low_bf16_f32(vld1q_f32(from));
    store((bf16*)&result + half * 8, vcvtq_high_bf16_f32(low, vld1q_f32(from + 4)));
  }
  return result;
#else
  const vu bits = (vu)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : (vu{} + 0x7fc0), vuh);
#endif
}

// to[2 i + which] = x[i]. Other elements are not written, so that threads may share vectors.
INLINE void store_halves(bf16* to, vuh x, int which) {
#if defined(__AVX512BW__)
  const vi words = __builtin_convertvector(x, vi) << 16 * which;
  _mm512_mask_storeu_epi16(to, 0x55555555u << which, (__m512i)words);
#else
  for (int i = 0; i < LANES; i++) to[2 * i + which] = x[i];
#endif
}

INLINE float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

INLINE bf16 narrow(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return x == x ? (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : (bf16)0x7fc0;
}

INLINE rf widen_f16(ruh x) {
#if defined(__AVX512F__)
  return (rf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__)
  return (rf)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (rf)vcvt_f32_f16((float16x4_t)x);
#else
  const ru bits = __builtin_convertvector(x, ru), rest = (bits & 0x7fff) << 13;
  const ru value = (ru)((rf)rest * 0x1p112f);  // biases differ by 112; denormals become normal
  const ru top = (ru)(rest >= 0x7c00 << 13) & 0x7f800000;  // of infinities and NaN
  return (rf)(value | top | (bits & 0x8000) << 16);
#endif
}

#if !defined(__AVX512F__)
INLINE vf widen_f16(vuh x) {
  vf value;
  UNROLL for (int part = 0; part < PARTS; part++)
    store((char*)&value + part * REGISTER,
          widen_f16(load<ruh>((const char*)&x + part * REGISTER / 2)));
  return value;
}
#endif

// The 8-bit numbers at `from` as 32-bit ones, and as floats; V is vf or rf. g++ 12 converts loaded
// vectors one number at a time, so x86's instructions are named.
template <class V, class Byte>
INLINE auto words_of(const Byte* from) {
  constexpr bool IS_SIGNED = std::is_signed_v<Byte>;
  if constexpr (sizeof(V) == sizeof(vf)) {
#if defined(__AVX512F__)
    const __m128i bytes = load<__m128i>(from);
    return (vi)(IS_SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    typedef std::conditional_t<IS_SIGNED, vb, vub> Bytes;
    return __builtin_convertvector(load<Bytes>(from), vi);
#endif
  } else {
#if defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)from);
    return (ri)(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    return ri{from[0], from[1], from[2], from[3]};
#endif
  }
}

template <class V, class Byte>
INLINE V floats_of(const Byte* from) {
  return to_float(words_of<V>(from));
}

INLINE float widen(f16 x) { return widen_f16(ruh{} + x.bits)[0]; }

// Round to the nearest f16, ties to even: from 65520 on to infinity. NaN stays NaN.
INLINE vuh narrow_f16(vf x) {
#if defined(__AVX512F__)
  return (vuh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const vu bits = (vu)x, size = bits & 0x7fffffff;
  const vu normal = (size - (112 << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
  const vu denormal = (vu)((vf)size + 0.5f) - 0x3f000000;  // 2^-24 is the last bit of 0.5
  vu rounded = size < 0x38800000 ? denormal : normal;
  rounded = size < 0x477ff000 ? rounded : vu{} + 0x7c00;
  rounded = x == x ? rounded : vu{} + 0x7e00;
  return __builtin_convertvector(rounded | ((bits >> 16) & 0x8000), vuh);
#endif
}

INLINE f16 narrow_f16(float x) { return {narrow_f16(x - vf{})[0]}; }

// Sums and maxima over the lanes, in a fixed order: each half is combined with the other, until one is left.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <class Combine>
INLINE float fold(vf x, Combine&& combine) {
  const __m256 half = combine(load<__m256>(&x), load<__m256>((const char*)&x + REGISTER));
  __m256 rest = combine(half, _mm256_permute2f128_ps(half, half, 1));
  rest = combine(rest, _mm256_permute_ps(rest, 0b1110));
  return _mm256_cvtss_f32(combine(rest, _mm256_permute_ps(rest, 1)));
}

INLINE float sum(vf x) {
  return fold(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}

INLINE float max_lane(vf x) {
  return fold(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
#else
INLINE float sum(vf x) {
  float lane[LANES];
  store(lane, x);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}

INLINE float max_lane(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lane[LANES];
  store(lane, x);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
#endif
}
#endif

INLINE vf absolute(vf x) { return bits_to_float(float_to_bits(x) & 0x7fffffff); }

// Round to the nearest integer, ties to even; good for |x| < 2^22.
INLINE vi round_to_int(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
  return float_to_bits(x + magic) - float_to_bits(magic);
}
#if !defined(__AVX512F__)
INLINE ri round_to_int(rf x) {
  const rf magic = spread(12582912.0f);
  return (ri)(x + magic) - (ri)magic;
}
#endif

// Numbers from -128 to 127 as bytes. g++ 12 converts them one at a time, without a named instruction.
INLINE vb to_bytes(vi x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i first = load<__m256i>(&x), last = load<__m256i>((const char*)&x + REGISTER);
  const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, last), 0b11011000);
  return (vb)_mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
#else
  return __builtin_convertvector(x, vb);
#endif
}

INLINE int32_t sum(ri x) {
  int32_t total = 0;
  for (int i = 0; i < REGISTER_LANES; i++) total += x[i];
  return total;
}

// A minimax polynomial of 2^f on [-1/2, 1/2], to about one unit in the last place.
INLINE vf exp2_of_fraction(vf f) {
  vf y = splat(1.5353362e-4f);
  y = fma(y, f, splat(1.3398874e-3f));
  y = fma(y, f, splat(9.6184370e-3f));
  y = fma(y, f, splat(5.5503324e-2f));
  y = fma(y, f, splat(2.4022648e-1f));
  y = fma(y, f, splat(6.9314720e-1f));
  return fma(y, f, splat(1.0f));
}

// The same to 3e-6, for results that are rounded to bf16.
INLINE vf exp2_of_fraction_short(vf f) {
  vf y = splat(9.5828529e-3f);
  y = fma(y, f, splat(5.5906426e-2f));
  y = fma(y, f, splat(2.4024099e-1f));
  y = fma(y, f, splat(6.9312418e-1f));
  return fma(y, f, splat(1.0f));
}

// 2^x; exactly 1 at 0, exactly 0 far below -126; x at most 127 and finite.
template <vf (*OF_FRACTION)(vf) = exp2_of_fraction>
INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
  const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  return (vf)_mm512_scalef_ps((__m512)OF_FRACTION(x - (vf)whole), whole);
#else
  const vi underflows = x < -126.0f;
  x = underflows ? splat(-126.0f) : x;
  const vi whole = round_to_int(x);
  const vf y = OF_FRACTION(x - to_float(whole));
  const vf power = bits_to_float((float_to_bits(y) + (whole << 23)) & ~underflows);
  return y == y ? power : y;  // NaN stays
#endif
}

INLINE vf exp(vf x) { return exp2(min(splat(88.0f), x) * 1.44269504f); }

}  // namespace remora
