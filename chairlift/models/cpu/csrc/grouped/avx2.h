// AVX2 and AVX-512 without VNNI: bytes are multiplied into pairs of 16 bits.
#pragma once

#include "group.h"

constexpr int PANELS_AT_ONCE = 1, GROUPS_AT_ONCE = 1;

// The instruction multiplies unsigned by signed bytes and adds pairs in 16 bits, which hold the sum only if one factor
// is small. So for 8 bits the magnitudes of weights are multiplied, by values that take the weights' signs.
#if defined(__AVX512BW__)
typedef __m512i Bytes;
INLINE Bytes broadcast(int32_t word) { return _mm512_set1_epi32(word); }
INLINE Bytes pairs_of(Bytes weights, Bytes values) { return _mm512_maddubs_epi16(weights, values); }
INLINE Bytes sums_of_pairs(Bytes words, int16_t scale) { return _mm512_madd_epi16(words, _mm512_set1_epi16(scale)); }
INLINE Bytes magnitudes(Bytes weights) { return _mm512_abs_epi8(weights); }
INLINE Bytes with_sign_of(Bytes values, Bytes weights) {
    return _mm512_mask_sub_epi8(values, _mm512_movepi8_mask(weights), Bytes{}, values);
}
#else
typedef __m256i Bytes;
INLINE Bytes broadcast(int32_t word) { return _mm256_set1_epi32(word); }
INLINE Bytes pairs_of(Bytes weights, Bytes values) { return _mm256_maddubs_epi16(weights, values); }
INLINE Bytes sums_of_pairs(Bytes words, int16_t scale) { return _mm256_madd_epi16(words, _mm256_set1_epi16(scale)); }
INLINE Bytes magnitudes(Bytes weights) { return _mm256_abs_epi8(weights); }
INLINE Bytes with_sign_of(Bytes values, Bytes weights) { return _mm256_sign_epi8(values, weights); }
#endif
typedef int16_t Words16 __attribute__((vector_size(sizeof(Bytes))));

// The products with `WORDS` words from one on. With fewer than 8 bits, 16 bits hold the sum of some of them.
template <int BITS, int WORDS>
INLINE i32_register multiply_words(const Group* group, const u32_register (&b)[GROUP_WORDS], int first) {
    [[maybe_unused]] constexpr int TOGETHER = BITS > 4 ? GROUP_WORDS >> (BITS - 4) : GROUP_WORDS;
    i32_register sum{};
    Words16 pairs{};
#pragma GCC unroll 8
    for (int w = 0; w < WORDS; w++) {
        const Bytes values = broadcast(load<int32_t>(group->values + 4 * (first + w)));
        const Bytes weights = bit_cast<Bytes>(b[first + w]);
        if constexpr (BITS == 8) {
            sum += bit_cast<i32_register>(
                sums_of_pairs(pairs_of(magnitudes(weights), with_sign_of(values, weights)), 1));
        } else {
            pairs += bit_cast<Words16>(pairs_of(weights, values));
            if ((w + 1) % TOGETHER && w + 1 < WORDS) continue;
            sum += bit_cast<i32_register>(sums_of_pairs(bit_cast<Bytes>(pairs), BITS == 4 ? 16 : 1));
            pairs = Words16{};
        }
    }
    return sum;
}

template <int BITS, int SCALES>
INLINE void multiply_register(const Group* group, const u32_register (&b)[GROUP_WORDS],
                              i32_register (&dots)[1][SCALES]) {
    constexpr int WORDS = GROUP_WORDS / SCALES;
    dots[0][0] = multiply_words<BITS, WORDS>(group, b, 0);
    if (SCALES > 1) dots[0][SCALES - 1] = multiply_words<BITS, WORDS>(group, b, GROUP_WORDS - WORDS);
}

INLINE void arrange(u32_register (&)[GROUP_WORDS]) {}
