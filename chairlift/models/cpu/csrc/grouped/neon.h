// NEON: with i8mm two rows at a time, else with dot products, else in 16 bits.
#pragma once

#include "group.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)

constexpr int PANELS_AT_ONCE = 1, GROUPS_AT_ONCE = 2;

// An instruction multiplies eight neighbours of two rows with those of two columns. A single row is used twice.
template <int BITS, int ROWS, int SCALES>
INLINE void multiply_register(const Group* groups, const u32_register (&b)[GROUP_WORDS],
                              i32_register (&dots)[ROWS][SCALES]) {
    constexpr int WORDS = GROUP_WORDS / SCALES;
#pragma GCC unroll 2
    for (int s = 0; s < SCALES; s++) {
        int32x4_t low = vdupq_n_s32(0), high = low;  // first two columns: one row's sums, the other's; then the next two
#pragma GCC unroll 4
        for (int w = s * WORDS; w < (s + 1) * WORDS; w += 2) {
            const int8x8_t first = vld1_s8(groups[0].values + 4 * w), second = vld1_s8(groups[ROWS - 1].values + 4 * w);
            const int8x16_t values = vcombine_s8(first, second);
            low = vmmlaq_s32(low, values, bit_cast<int8x16_t>(b[w]));
            high = vmmlaq_s32(high, values, bit_cast<int8x16_t>(b[w + 1]));
        }
        const int32x4_t rows[] = {vcombine_s32(vget_low_s32(low), vget_low_s32(high)),
                                  vcombine_s32(vget_high_s32(low), vget_high_s32(high))};
        for (int r = 0; r < ROWS; r++)
            dots[r][s] = bit_cast<i32_register>(BITS == 4 ? vshlq_n_s32(rows[r], 4) : rows[r]);
    }
}

// Two words of four columns -> eight neighbours of the first two columns, and of the next two.
INLINE void interleave(u32_register& first, u32_register& second) {
    const uint32x4_t low = bit_cast<uint32x4_t>(first), high = bit_cast<uint32x4_t>(second);
    first = bit_cast<u32_register>(vzip1q_u32(low, high));
    second = bit_cast<u32_register>(vzip2q_u32(low, high));
}

INLINE void arrange(u32_register (&words)[GROUP_WORDS]) {
#pragma GCC unroll 4
    for (int w = 0; w < GROUP_WORDS; w += 2) interleave(words[w], words[w + 1]);
}

#else

constexpr int PANELS_AT_ONCE = 1, GROUPS_AT_ONCE = 1;

// Adds the products with some words to `sum`.
template <int BITS, int WORDS>
INLINE void add_words(const Group* group, const u32_register (&b)[GROUP_WORDS], int first, int32x4_t& sum) {
#if !defined(__ARM_FEATURE_DOTPROD)
    // 16 bits hold two products of 8 bits, four of 6, eight of 5.
    static_assert(BITS == 8 || BITS <= 5 || WORDS <= 4);
    int16x8_t low = vdupq_n_s16(0), high = low;
#endif
#pragma GCC unroll 8
    for (int w = first; w < first + WORDS; w++) {
        const int8x16_t weights = bit_cast<int8x16_t>(b[w]);
        const int8x16_t values = bit_cast<int8x16_t>(vdupq_n_s32(load<int32_t>(group->values + 4 * w)));
#if defined(__ARM_FEATURE_DOTPROD)
        sum = vdotq_s32(sum, weights, values);
#else
        if (BITS < 8) {
            low = vmlal_s8(low, vget_low_s8(weights), vget_low_s8(values));
            high = vmlal_s8(high, vget_high_s8(weights), vget_high_s8(values));
        } else {
            low = vmull_s8(vget_low_s8(weights), vget_low_s8(values));
            high = vmull_s8(vget_high_s8(weights), vget_high_s8(values));
            sum = vpadalq_s16(sum, vpaddq_s16(low, high));
        }
#endif
    }
#if !defined(__ARM_FEATURE_DOTPROD)
    if (BITS < 8) sum = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}

template <int BITS, int SCALES>
INLINE void multiply_register(const Group* group, const u32_register (&b)[GROUP_WORDS],
                              i32_register (&dots)[1][SCALES]) {
    constexpr int WORDS = GROUP_WORDS / SCALES;
#pragma GCC unroll 2
    for (int s = 0; s < SCALES; s++) {
        int32x4_t sum = vdupq_n_s32(0);
        add_words<BITS, WORDS>(group, b, s * WORDS, sum);
        dots[0][s] = bit_cast<i32_register>(BITS == 4 ? vshlq_n_s32(sum, 4) : sum);
    }
}

INLINE void arrange(u32_register (&)[GROUP_WORDS]) {}

#endif
