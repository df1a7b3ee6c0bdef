// Sixteen lanes at a time. The compiler's vector extensions give one source for every machine: an AVX-512 register,
// two AVX2 ones, or four of the plain kind.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2)));
typedef int8_t i8x16 __attribute__((vector_size(16), aligned(1)));
typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(1)));

struct bf16 {
    uint16_t bits;
};

struct half {  // IEEE's float16
    uint16_t bits;
};

template <class V> INLINE V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V> INLINE void store_raw(void* to, V v) { std::memcpy(to, &v, sizeof v); }

template <class To, class From> INLINE To bit_cast(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}

INLINE f32x16 splat(float x) { return x - f32x16{}; }

// ---- number formats <-> float32 ----

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

INLINE f32x16 load16(const float* p) { return load<f32x16>(p); }
INLINE f32x16 load16(const bf16* p) {
    return bit_cast<f32x16>(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}

INLINE f32x16 load16(const uint8_t* p) {
#if defined(__AVX512F__)
    return bit_cast<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load<__m128i>(p))));  // gcc would go one by one
#else
    return __builtin_convertvector(load<u8x16>(p), f32x16);
#endif
}
INLINE f32x16 load16(const half* p) {
#if defined(__AVX512F__)
    return bit_cast<f32x16>(_mm512_cvtph_ps(load<__m256i>(p)));
#else
    const u32x16 bits = __builtin_convertvector(load<u16x16>(p), u32x16), size = bits & 0x7fff;
    const u32x16 scaled = bit_cast<u32x16>(bit_cast<f32x16>(size << 13) * 0x1p112f);  // another bias of the exponent
    return bit_cast<f32x16>((size >= 0x7c00 ? (size << 13) | 0x7f800000u : scaled) | (bits & 0x8000) << 16);
#endif
}

// Round to nearest even; what is not a number stays so.
INLINE u32x16 round_to_bf16(f32x16 x) {
    u32x16 bits = bit_cast<u32x16>(x);
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? rounded : (bits >> 16) | 0x40;
}

INLINE void store16(float* p, f32x16 x) { store_raw(p, x); }
INLINE void store16(bf16* p, f32x16 x) {
#if defined(__AVX512BF16__)
    store_raw(p, _mm512_cvtneps_pbh(bit_cast<__m512>(x)));
#else
    store_raw(p, __builtin_convertvector(round_to_bf16(x), u16x16));
#endif
}

// Two vectors one after the other.
INLINE void store32(float* p, f32x16 first, f32x16 second) {
    store16(p, first);
    store16(p + LANES, second);
}
INLINE void store32(bf16* p, f32x16 first, f32x16 second) {
#if defined(__AVX512BF16__)
    store_raw(p, _mm512_cvtne2ps_pbh(bit_cast<__m512>(second), bit_cast<__m512>(first)));
#else
    store16(p, first);
    store16(p + LANES, second);
#endif
}

INLINE void store1(float* p, float x) { *p = x; }
INLINE void store1(bf16* p, float x) {
    uint32_t bits = bit_cast<uint32_t>(x);
    p->bits = x == x ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : uint16_t((bits >> 16) | 0x40);
}

// ---- arithmetic ----

// a b + c, rounded once where the processor can. Said outright, and the compiler is told to fuse nothing else: what it
// fuses may differ from one copy of a function to the next, and with it the last bit.
INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return bit_cast<f32x16>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, sizeof a);
    std::memcpy(y, &b, sizeof b);
    std::memcpy(z, &c, sizeof c);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    std::memcpy(&c, z, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}

// Of something and what is not a number, `b`.
INLINE f32x16 max16(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return bit_cast<f32x16>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
#else
    return a > b ? a : b;
#endif
}
INLINE f32x16 abs16(f32x16 a) { return bit_cast<f32x16>(bit_cast<u32x16>(a) & 0x7fffffffu); }

// A fixed tree, so that a sum does not depend on how the compiler unrolls.
INLINE float sum16(f32x16 x) {
    float v[LANES];
    store_raw(v, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

INLINE int32_t max_of16(i32x16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32(bit_cast<__m512i>(x));
#else
    int32_t best = x[0];
    for (int i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
#endif
}

INLINE int32_t sum16(i32x16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(bit_cast<__m512i>(x));
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

// 2^x: floor(x) goes into the exponent, a polynomial takes the rest (a minimax fit of 2^r on [0, 1) that is exact at 0,
// so that what is not scaled stays as it is) to a relative error of 1e-7, or of 9e-5 for what becomes a bfloat16, whose
// own is 4e-3. Exactly 0 far below, so that what is masked with a very negative score weighs nothing.
template <class T = float> INLINE f32x16 exp2_16(f32x16 x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    constexpr int FRACTION = _MM_FROUND_TO_NEG_INF;  // x - floor(x)
    f32x16 rest = bit_cast<f32x16>(_mm512_reduce_ps(bit_cast<__m512>(x), FRACTION));
#else
    x = x < -127.0f ? splat(-127.0f) : (x > 126.0f ? splat(126.0f) : x);
    f32x16 whole = __builtin_convertvector(__builtin_convertvector(x, i32x16), f32x16);
    whole = whole > x ? whole - 1.0f : whole;
    f32x16 rest = x - whole;
#endif
    constexpr float fine[]{1.86713013e-3f, 9.01703016e-3f, 5.57999133e-2f, 2.40164450e-1f, 6.93151312e-1f, 1.0f};
    constexpr float coarse[]{7.7067040e-2f, 2.2764500e-1f, 6.9511679e-1f, 1.0f};
    constexpr bool IS_COARSE = sizeof(T) == 2;
    f32x16 p = splat(IS_COARSE ? coarse[0] : fine[0]);
#pragma GCC unroll 5
    for (int i = 1; i < (IS_COARSE ? 4 : 6); i++) p = fma16(p, rest, splat(IS_COARSE ? coarse[i] : fine[i]));
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return bit_cast<f32x16>(_mm512_scalef_ps(bit_cast<__m512>(p), bit_cast<__m512>(x)));  // p 2^floor(x)
#else
    f32x16 power = bit_cast<f32x16>(bit_cast<i32x16>(p) + (__builtin_convertvector(whole, i32x16) << 23));
    return x < -126.0f ? splat(0.0f) : power;
#endif
}

constexpr float LOG2_E = 1.44269504f;

INLINE f32x16 silu16(f32x16 x) { return x / (1.0f + exp2_16(x * -LOG2_E)); }

// x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks & Gimpel 2016), which is x / (1 + exp(-2 u)).
INLINE f32x16 gelu16(f32x16 x) {
    constexpr float SQRT_2_OVER_PI = 0.797884561f;
    const f32x16 u = SQRT_2_OVER_PI * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp2_16(u * (-2 * LOG2_E)));
}

// cap tanh(x / cap), to an error of 1e-7 cap.
INLINE f32x16 cap16(f32x16 x, float cap) {
    const f32x16 power = exp2_16(abs16(x) * (-2 * LOG2_E / cap));
    const f32x16 size = (1.0f - power) / (1.0f + power) * cap;
    return x < 0.0f ? -size : size;
}

// Of two vectors, the lanes whose number lacks the bit `WIDTH`, those of the second moved up by it; then those with it.
template <int WIDTH> struct Exchange;
template <> struct Exchange<8> {
    static constexpr u32x16 low{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
};
template <> struct Exchange<4> {
    static constexpr u32x16 low{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
};
template <> struct Exchange<2> {
    static constexpr u32x16 low{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
};
template <> struct Exchange<1> {
    static constexpr u32x16 low{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
};

// 16 x 16 words, rows to columns: blocks of 8, 4, 2 and 1 change places.
template <int WIDTH = LANES / 2> INLINE void transpose16(u32x16 (&m)[LANES]) {
    for (int i = 0; i < LANES; i++) {
        if (i & WIDTH) continue;
        const u32x16 a = m[i], b = m[i | WIDTH];
        m[i] = __builtin_shuffle(a, b, Exchange<WIDTH>::low);
        m[i | WIDTH] = __builtin_shuffle(a, b, Exchange<WIDTH>::low + WIDTH);
    }
    if constexpr (WIDTH > 1) transpose16<WIDTH / 2>(m);
}

// 16 vectors -> lane i is all of vector i's lanes, combined two by two: those 8 apart, then 4, 2 and 1.
template <int WIDTH = LANES / 2, class Combine> INLINE f32x16 fold16(f32x16 (&m)[LANES], Combine combine) {
    for (int i = 0; i < WIDTH; i++) {
        const f32x16 a = m[i], b = m[i + WIDTH];
        m[i] = combine(__builtin_shuffle(a, b, Exchange<WIDTH>::low),
                       __builtin_shuffle(a, b, Exchange<WIDTH>::low + WIDTH));
    }
    if constexpr (WIDTH > 1)
        return fold16<WIDTH / 2>(m, combine);
    else
        return m[0];
}
