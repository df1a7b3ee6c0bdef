// Number formats: sixteen numbers in memory, and the same as vectors of float32 or integers.
#pragma once

#include "lanes.h"

struct bf16 {
    uint16_t bits;
};

struct half {  // IEEE's float16
    uint16_t bits;
};

struct power_of_2 {  // E8M0: a float's exponent alone, but that 0 is 0
    uint8_t exponent;
};

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

INLINE f32x16 load16(const float* p) { return load<f32x16>(p); }
INLINE u32x16 load16(const uint16_t* p) { return convert<u32x16>(load<u16x16>(p)); }
INLINE f32x16 load16(const bf16* p) { return bit_cast<f32x16>(load16(&p->bits) << 16); }

// Intrinsics, since gcc would convert bytes one by one.
INLINE f32x16 load16(const int8_t* p) {
#if defined(__AVX512F__)
    return bit_cast<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p))));
#elif defined(__AVX2__)
    const auto half = [](const int8_t* from) {
        return bit_cast<f32_register>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from))));
    };
    return {half(p), half(p + REGISTER_LANES)};
#elif defined(__aarch64__)
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    const auto four = [](int16x4_t words) { return bit_cast<f32_register>(vcvtq_f32_s32(vmovl_s16(words))); };
    return {{four(vget_low_s16(low)), four(vget_high_s16(low))}, {four(vget_low_s16(high)), four(vget_high_s16(high))}};
#else
    return convert<f32x16>(load<i8x16>(p));
#endif
}
INLINE f32x16 load16(const uint8_t* p) {
#if defined(__AVX512F__)
    return bit_cast<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load<__m128i>(p))));
#elif defined(__AVX2__)
    const auto half = [](const uint8_t* from) {
        return bit_cast<f32_register>(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from))));
    };
    return {half(p), half(p + REGISTER_LANES)};
#elif defined(__aarch64__)
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    const auto four = [](uint16x4_t words) { return bit_cast<f32_register>(vcvtq_f32_u32(vmovl_u16(words))); };
    return {{four(vget_low_u16(low)), four(vget_high_u16(low))}, {four(vget_low_u16(high)), four(vget_high_u16(high))}};
#else
    return convert<f32x16>(load<u8x16>(p));
#endif
}

INLINE f32x16 load16(const power_of_2* p) {
#if defined(__AVX512F__)
    return bit_cast<f32x16>(_mm512_slli_epi32(_mm512_cvtepu8_epi32(load<__m128i>(p)), 23));
#else
    return bit_cast<f32x16>(convert<i32x16>(load16(&p->exponent)) << 23);
#endif
}

INLINE f32x16 load16(const half* p) {
#if defined(__AVX512F__)
    return bit_cast<f32x16>(_mm512_cvtph_ps(load<__m256i>(p)));
#elif defined(__F16C__)
    const half* second = p + REGISTER_LANES;
    return {bit_cast<f32_register>(_mm256_cvtph_ps(load<__m128i>(p))),
            bit_cast<f32_register>(_mm256_cvtph_ps(load<__m128i>(second)))};
#elif defined(__aarch64__)
    const auto four = [p](int i) { return bit_cast<f32_register>(vcvt_f32_f16(load<float16x4_t>(p + i))); };
    return {{four(0), four(4)}, {four(8), four(12)}};
#else
    const u32x16 bits = load16(&p->bits), size = bits & 0x7fff;
    const f32x16 scaled = bit_cast<f32x16>(size << 13) * 0x1p112f;  // adjusts the exponent's bias
    const f32x16 number = select(size >= 0x7c00, bit_cast<f32x16>((size << 13) | 0x7f800000u), scaled);
    return bit_cast<f32x16>(bit_cast<u32x16>(number) | (bits & 0x8000) << 16);
#endif
}

// Rounds to nearest even; NaN stays NaN.
INLINE u32x16 round_to_bf16(f32x16 x) {
    u32x16 bits = bit_cast<u32x16>(x);
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return select(x == x, rounded, (bits >> 16) | 0x40);
}

INLINE void store16(float* p, f32x16 x) { store_raw(p, x); }
INLINE void store16(bf16* p, f32x16 x) {
#if defined(__AVX512BF16__)
    store_raw(p, _mm512_cvtneps_pbh(bit_cast<__m512>(x)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const u32x16 bits = round_to_bf16(x);
    const __m256i packed = _mm256_packus_epi32(bit_cast<__m256i>(bits.lo), bit_cast<__m256i>(bits.hi));
    store_raw(p, _mm256_permute4x64_epi64(packed, 0xd8));  // packing goes by halves of registers
#else
    store_raw(p, convert<u16x16>(round_to_bf16(x)));
#endif
}

// For integers that fit into a byte.
INLINE void store16(int8_t* p, i32x16 x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i words = _mm256_packs_epi32(bit_cast<__m256i>(x.lo), bit_cast<__m256i>(x.hi));
    const __m256i bytes = _mm256_packs_epi16(words, words);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
    store_raw(p, _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(bytes, order)));
#elif defined(__aarch64__)
    const auto eight = [](Half<i32x16> words) {
        const int16x4_t low = vmovn_s32(bit_cast<int32x4_t>(words.lo)), high = vmovn_s32(bit_cast<int32x4_t>(words.hi));
        return vmovn_s16(vcombine_s16(low, high));
    };
    store_raw(p, vcombine_s8(eight(x.lo), eight(x.hi)));
#else
    store_raw(p, convert<i8x16>(x));
#endif
}

// Stores two vectors one after the other.
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
