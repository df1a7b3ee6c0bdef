// Panels of weights that are small integers, in groups of neighbours along the depth with a scale and perhaps an offset
// each: a weight is scale * value + offset.
//
// Panels hold unsigned bytes. As in product/panel.h, words of four neighbours of a column are transposed: word k of all
// columns, then word k + 1. With 4 bits, a byte has a value of word 2 k in its low half and one of word 2 k + 1 in its
// high half. For element i of column j, wi,j:
//
//                       column 0                     column 15
//     8 bits, line 0  [ w0,0  w1,0  w2,0  w3,0 | ... | w0,15 ... w3,15 ]   word 0; a line has 64 bytes
//             line 1  [ w4,0  w5,0  w6,0  w7,0 | ... | w4,15 ... w7,15 ]   word 1
//             ...
//     4 bits, line 0  [ w0,0  w1,0  w2,0  w3,0 | ... | w0,15 ... w3,15 ]   word 0, low halves
//                     [ w4,0  w5,0  w6,0  w7,0 | ... | w4,15 ... w7,15 ]   word 1, high halves of the same bytes
//             ...
//     scales          [ group 0 of column 0    | ... | of column 15    ]   in an array of their own; offsets likewise
//                     [ group 1 of column 0    | ... | of column 15    ]
//             ...
//
// As arrays a panel is [depth / 4][16][4] or [depth / 8][16][4], and its scales are [depth / group_size][16].
//
// With 8 bits a byte is the value + 128. With 4 bits a value is multiplied as 16 times itself, a half of a byte in its
// place, and scales are divided by 16. So without offsets, where 8 stands for zero, both kinds are bytes around 128.
//
// With a table a half of a byte is a code, and its byte in the table is multiplied as one of 8 bits. There are no offsets.
//
// Scales and offsets are multiples of their column's unit: float16 or unsigned bytes. As a byte a scale is the byte,
// and an offset -240 times the byte. (With scales up to 255 units, weights on both sides of 0 need offsets from 0 down
// to -15 * 16 times as much.)
//
// With steps both are bytes: multiples of a step that neighbours along the depth share, which is float16 and itself in
// units. Steps are [depth / group_size / scales_per_step][2][16] for a panel: those of its scales, then of its offsets.
#pragma once

#include "../model.h"
#include "level.h"

constexpr float OFFSET_OF_BYTE = -240;

// `ahead`: the distance, in scales, to the same place in the next panels, which is prefetched.
template <class T> INLINE f32x16 load_ahead(const void* from, int64_t place, int64_t ahead) {
    const T* scales = static_cast<const T*>(from) + place;
    __builtin_prefetch(scales + ahead, 0, 2);
    return load16(scales);
}

INLINE f32x16 load_scales(const Matrix& matrix, int64_t place, int64_t ahead = 0) {
    return matrix.scale_bits == 16 ? load_ahead<half>(matrix.scales, place, ahead)
                                   : load_ahead<uint8_t>(matrix.scales, place, ahead);
}

INLINE f32x16 load_offsets(const Matrix& matrix, int64_t place, int64_t ahead = 0) {
    return matrix.scale_bits == 16 ? load_ahead<half>(matrix.offsets, place, ahead)
                                   : load_ahead<uint8_t>(matrix.offsets, place, ahead) * OFFSET_OF_BYTE;
}

// How weights are stored and multiplied.
struct Bytes8 {
    static constexpr int STORED_BITS = 8, BITS = 8;
    static constexpr bool HAS_STEPS = false;
};
struct Halves4 {
    static constexpr int STORED_BITS = 4, BITS = 4;
    static constexpr bool HAS_STEPS = false;
};
struct SteppedHalves4 {
    static constexpr int STORED_BITS = 4, BITS = 4;
    static constexpr bool HAS_STEPS = true;
};
struct Codes4 {
    static constexpr int STORED_BITS = 4, BITS = 8;
    static constexpr bool HAS_STEPS = false;
};

// The steps of some neighbouring scales and offsets of a panel's columns.
struct Steps {
    f32x16 scale, offset;
};

// Those of a panel at `run`, a number over all of its runs and those of the panels before.
INLINE Steps load_steps(const Matrix& matrix, int64_t run, int64_t ahead = 0) {
    const int64_t place = run * 2 * LANES;
    return {load_ahead<half>(matrix.steps, place, ahead), load_ahead<half>(matrix.steps, place + LANES, ahead) * 16.0f};
}

// The bytes of a table of 16 at the places that the bytes of some words say.
INLINE u32_register look_up(u32_register places, const uint8_t* table) {
#if defined(__AVX512BW__)
    const __m512i all = _mm512_broadcast_i32x4(load<__m128i>(table));
    return bit_cast<u32_register>(_mm512_shuffle_epi8(all, bit_cast<__m512i>(places)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i all = _mm256_broadcastsi128_si256(load<__m128i>(table));
    return bit_cast<u32_register>(_mm256_shuffle_epi8(all, bit_cast<__m256i>(places)));
#elif defined(__aarch64__)
    return bit_cast<u32_register>(vqtbl1q_u8(vld1q_u8(table), bit_cast<uint8x16_t>(places)));
#else
    uint8_t bytes[sizeof places];
    store_raw(bytes, places);
    for (uint8_t& each : bytes) each = table[each];
    return load<u32_register>(bytes);
#endif
}
template <class H> INLINE Pair<H> look_up(Pair<H> places, const uint8_t* table) {
    return {look_up(places.lo, table), look_up(places.hi, table)};
}

// `ahead`: the distance to the same place in the next panels, which is prefetched into the second-level cache.
template <class Format>
INLINE void load_words(const char* from, int64_t ahead, const uint8_t* table, u32x16 (&words)[GROUP_WORDS]) {
    constexpr int STEP = 8 / Format::STORED_BITS;
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w += STEP, from += 64) {
        const u32x16 bytes = load<u32x16>(from);
        __builtin_prefetch(from + ahead, 0, 2);
        if constexpr (STEP == 1) {
            words[w] = as_factor(bytes);
        } else if constexpr (Format::BITS == 8) {
            words[w] = as_factor(look_up(bytes & 0x0f0f0f0fu, table));
            words[w + STEP - 1] = as_factor(look_up((bytes >> 4) & 0x0f0f0f0fu, table));
        } else {
            constexpr uint32_t MASK = 0x0f0f0f0fu << HALVES_UP;
            words[w] = (bytes << HALVES_UP) & MASK;
            words[w + STEP - 1] = (bytes >> (4 - HALVES_UP)) & MASK;
        }
    }
}

// The words of the columns from `lane` on, as they are multiplied.
INLINE void select_columns(const u32x16 (&all)[GROUP_WORDS], int lane, u32_register (&words)[GROUP_WORDS]) {
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w++) words[w] = register_of<u32_register>(all[w], lane);
    arrange(words);
}

// Reads `count` weights of a column.
inline void read_column(const Matrix& matrix, int64_t column, int64_t count, float* to, const Group*) {
    const int64_t lane = column % LANES, panel = column / LANES, num_scales = matrix.depth / matrix.group_size;
    const int64_t words_together = 8 / matrix.num_bits;
    const int32_t zero = matrix.num_bits == 8 || !matrix.offsets ? ZERO : 0;
    const uint8_t* from = static_cast<const uint8_t*>(matrix.panels) + panel * matrix.depth * LANES / words_together;
    const float unit = matrix.units[column];
    float scales[LANES], offsets[LANES] = {};
    for (int64_t k = 0; k < count; k++) {
        if (k % matrix.group_size == 0) {
            const int64_t group = panel * num_scales + k / matrix.group_size, place = group * LANES;
            if (matrix.steps) {
                const Steps steps = load_steps(matrix, group / matrix.scales_per_step);
                store16(scales, load_ahead<uint8_t>(matrix.scales, place, 0) * steps.scale * unit);
                store16(offsets, load_ahead<uint8_t>(matrix.offsets, place, 0) * steps.offset * unit);
            } else {
                store16(scales, load_scales(matrix, place) * unit);
                if (matrix.offsets) store16(offsets, load_offsets(matrix, place) * unit);
            }
        }
        const int64_t word = k / 4;
        int32_t byte = from[(word / words_together * LANES + lane) * 4 + k % 4];
        if (matrix.table)
            byte = matrix.table[word % 2 ? byte >> 4 : byte & 15];
        else if (words_together == 2)
            byte = (word % 2 ? byte : byte << 4) & 0xf0;
        to[k] = scales[lane] * float(byte - zero) + offsets[lane];
    }
}
