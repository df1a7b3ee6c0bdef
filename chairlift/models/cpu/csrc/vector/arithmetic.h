// Arithmetic with sixteen numbers at a time.
#pragma once

#include "numbers.h"

// a b + c, rounded once where the processor can. It is explicit, and the compiler is told to fuse nothing else: its
// choices may differ from one copy of a function to the next, and with them the last bit.
INLINE f32_register fma16(f32_register a, f32_register b, f32_register c) {
#if defined(__AVX512F__)
    return bit_cast<f32_register>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__FMA__)
    return bit_cast<f32_register>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#elif defined(__aarch64__)
    return bit_cast<f32_register>(
        vfmaq_f32(bit_cast<float32x4_t>(c), bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}
template <class H> INLINE Pair<H> fma16(Pair<H> a, Pair<H> b, Pair<H> c) {
    return {fma16(a.lo, b.lo, c.lo), fma16(a.hi, b.hi, c.hi)};
}

// If either is NaN, the result is `b`.
INLINE f32_register max16(f32_register a, f32_register b) {
#if defined(__AVX512F__)
    return bit_cast<f32_register>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
#elif defined(__AVX2__)
    return bit_cast<f32_register>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
#else
    return select(a > b, a, b);
#endif
}
template <class H> INLINE Pair<H> max16(Pair<H> a, Pair<H> b) { return {max16(a.lo, b.lo), max16(a.hi, b.hi)}; }

INLINE f32x16 abs16(f32x16 a) { return bit_cast<f32x16>(bit_cast<u32x16>(a) & 0x7fffffffu); }

// All lanes combined two by two: those 8 apart, then 4, 2 and 1. A fixed tree, so that a sum does not depend on how the
// compiler unrolls.
template <class V, class Combine> INLINE auto reduce(V x, Combine combine) {
    if constexpr (IS_PAIR<V>) {
        return reduce(combine(x.lo, x.hi), combine);
    } else {
        typename ElementOf<V>::type v[REGISTER_LANES];
        store_raw(v, x);
        for (int width = REGISTER_LANES / 2; width > 0; width /= 2)
            for (int i = 0; i < width; i++) v[i] = combine(v[i], v[i + width]);
        return v[0];
    }
}

INLINE float sum16(f32x16 x) {
    return reduce(x, [](auto a, auto b) { return a + b; });
}

INLINE int32_t sum16(i32x16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(bit_cast<__m512i>(x));
#else
    return reduce(x, [](auto a, auto b) { return a + b; });
#endif
}

INLINE int32_t max_of16(i32x16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32(bit_cast<__m512i>(x));
#else
    return reduce(x, [](auto a, auto b) { return select(a > b, a, b); });
#endif
}

// 2^x: floor(x) goes into the exponent, and a polynomial takes the fraction (a minimax fit of 2^r on [0, 1) that is
// exact at 0, so that what is not scaled stays as it is) to a relative error of 1e-7, or of 9e-5 for bfloat16 results,
// whose own is 4e-3. Far below it is exactly 0, so that keys masked with a very negative score have no weight.
template <class T = float> INLINE f32x16 exp2_16(f32x16 x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    constexpr int FRACTION = _MM_FROUND_TO_NEG_INF;  // x - floor(x)
    f32x16 fraction = bit_cast<f32x16>(_mm512_reduce_ps(bit_cast<__m512>(x), FRACTION));
#else
    x = select(x < -127.0f, splat(-127.0f), select(x > 126.0f, splat(126.0f), x));
    f32x16 whole = convert<f32x16>(convert<i32x16>(x));
    whole = select(whole > x, whole - 1.0f, whole);
    const f32x16 fraction = x - whole;
#endif
    constexpr float fine[]{1.86713013e-3f, 9.01703016e-3f, 5.57999133e-2f, 2.40164450e-1f, 6.93151312e-1f, 1.0f};
    constexpr float coarse[]{7.7067040e-2f, 2.2764500e-1f, 6.9511679e-1f, 1.0f};
    constexpr bool IS_COARSE = sizeof(T) == 2;
    f32x16 p = splat(IS_COARSE ? coarse[0] : fine[0]);
#pragma GCC unroll 5
    for (int i = 1; i < (IS_COARSE ? 4 : 6); i++) p = fma16(p, fraction, splat(IS_COARSE ? coarse[i] : fine[i]));
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    return bit_cast<f32x16>(_mm512_scalef_ps(bit_cast<__m512>(p), bit_cast<__m512>(x)));  // p 2^floor(x)
#else
    const f32x16 power = bit_cast<f32x16>(bit_cast<u32x16>(p) + (bit_cast<u32x16>(convert<i32x16>(whole)) << 23));
    return select(x < -126.0f, splat(0.0f), power);
#endif
}

constexpr float LOG2_E = 1.44269504f;

INLINE f32x16 sigmoid16(f32x16 x) { return 1.0f / (1.0f + exp2_16(x * -LOG2_E)); }

INLINE f32x16 silu16(f32x16 x) { return x / (1.0f + exp2_16(x * -LOG2_E)); }

// x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks & Gimpel 2016), which is x / (1 + exp(-2 u)).
INLINE f32x16 gelu16(f32x16 x) {
    constexpr float SQRT_2_OVER_PI = 0.797884561f;
    const f32x16 u = SQRT_2_OVER_PI * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp2_16(u * (-2 * LOG2_E)));
}

// log(1 + exp(x)), by the series of log(1 + u) = 2 atanh(u / (2 + u)) for u = exp(-|x|), to an error of 1e-7.
INLINE f32x16 softplus16(f32x16 x) {
    const f32x16 u = exp2_16(abs16(x) * -LOG2_E), s = u / (2.0f + u), squared = s * s;
    f32x16 sum = splat(1.0f / 13);
    for (int n = 11; n > 0; n -= 2) sum = fma16(sum, squared, splat(1.0f / float(n)));
    return select(x > 0.0f, x, splat(0.0f)) + 2.0f * s * sum;
}

// cap tanh(x / cap), to an error of 1e-7 cap.
INLINE f32x16 cap16(f32x16 x, float cap) {
    const f32x16 power = exp2_16(abs16(x) * (-2 * LOG2_E / cap));
    const f32x16 size = (1.0f - power) / (1.0f + power) * cap;
    return select(x < 0.0f, -size, size);
}

// 16 x 16 words, rows to columns: blocks of 8, 4, 2 and 1 change places.
template <int WIDTH = LANES / 2> INLINE void transpose16(u32x16 (&m)[LANES]) {
#if defined(__AVX512F__)
    // Blocks of 1 and 2 first, by instructions that need no registers for the order and leave what they read.
    __m512i two[LANES], four[LANES], eight[LANES];
    for (int i = 0; i < LANES; i += 2) {
        const __m512i a = bit_cast<__m512i>(m[i]), b = bit_cast<__m512i>(m[i + 1]);
        two[i] = _mm512_unpacklo_epi32(a, b), two[i + 1] = _mm512_unpackhi_epi32(a, b);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = _mm512_unpacklo_epi64(two[i + j], two[i + j + 2]);
            four[i + 2 * j + 1] = _mm512_unpackhi_epi64(two[i + j], two[i + j + 2]);
        }
    constexpr int EVEN = 0x88, ODD = 0xdd;  // of both registers' quarters
    for (int i = 0; i < LANES; i += 8)
        for (int j = i; j < i + 4; j++) {
            eight[j] = _mm512_shuffle_i32x4(four[j], four[j + 4], EVEN);
            eight[j + 4] = _mm512_shuffle_i32x4(four[j], four[j + 4], ODD);
        }
    for (int i = 0; i < LANES / 2; i++) {
        m[i] = bit_cast<u32x16>(_mm512_shuffle_i32x4(eight[i], eight[i + 8], EVEN));
        m[i + 8] = bit_cast<u32x16>(_mm512_shuffle_i32x4(eight[i], eight[i + 8], ODD));
    }
#else
    for (int i = 0; i < LANES; i++) {
        if (i & WIDTH) continue;
        const u32x16 a = m[i], b = m[i | WIDTH];
        m[i] = exchange<WIDTH, false>(a, b);
        m[i | WIDTH] = exchange<WIDTH, true>(a, b);
    }
    if constexpr (WIDTH > 1) transpose16<WIDTH / 2>(m);
#endif
}

// 16 vectors -> lane i is all of vector i's lanes, combined two by two: those 8 apart, then 4, 2 and 1.
template <int WIDTH = LANES / 2, class Combine> INLINE f32x16 fold16(f32x16 (&m)[LANES], Combine combine) {
    for (int i = 0; i < WIDTH; i++) {
        const f32x16 a = m[i], b = m[i + WIDTH];
        m[i] = combine(exchange<WIDTH, false>(a, b), exchange<WIDTH, true>(a, b));
    }
    if constexpr (WIDTH > 1)
        return fold16<WIDTH / 2>(m, combine);
    else
        return m[0];
}
