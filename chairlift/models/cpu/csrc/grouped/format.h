// The formats of weights in groups, and the words of a group as they are multiplied. panel.h draws them.
#pragma once

#include <type_traits>

#include "../model.h"
#include "level.h"

// How weights are stored and multiplied. STORED_BITS: of a weight in a panel; BITS: of what is multiplied; TIMES: that
// is so many times the value; SCALES: of a group of 32.
struct Bytes8 {
    static constexpr int STORED_BITS = 8, BITS = 8, TIMES = 1, SCALES = 1;
    static constexpr bool HAS_STEPS = false;
};
struct Halves4 {
    static constexpr int STORED_BITS = 4, BITS = 4, TIMES = 16, SCALES = 1;
    static constexpr bool HAS_STEPS = false;
};
struct SteppedHalves4 {
    static constexpr int STORED_BITS = 4, BITS = 4, TIMES = 16, SCALES = 1;
    static constexpr bool HAS_STEPS = true;
};
struct Codes4 {
    static constexpr int STORED_BITS = 4, BITS = 8, TIMES = 1, SCALES = 1;
    static constexpr bool HAS_STEPS = false;
};
struct Planes2 {
    static constexpr int STORED_BITS = 2, BITS = 2, TIMES = 1, SCALES = 2;
    static constexpr bool HAS_STEPS = true;
};
struct Planes3 {
    static constexpr int STORED_BITS = 3, BITS = 6, TIMES = 8, SCALES = 2;
    static constexpr bool HAS_STEPS = true;
};
struct Planes5 {
    static constexpr int STORED_BITS = 5, BITS = 5, TIMES = 1, SCALES = 1;
    static constexpr bool HAS_STEPS = true;
};
struct Planes6 {
    static constexpr int STORED_BITS = 6, BITS = 6, TIMES = 1, SCALES = 2;
    static constexpr bool HAS_STEPS = true;
};

// The byte that represents 0 in what is multiplied.
template <class Format, bool HAS_OFFSETS>
constexpr int32_t ZERO_OF = HAS_OFFSETS && Format::BITS < 8 ? 0 : Format::SCALES > 1 ? HALF_ZERO : ZERO;

// Calls a function with the format of a matrix, and with whether it has offsets, as types. Its results are of one type.
template <class Use> INLINE auto with_format(const Matrix& matrix, Use use) {
    constexpr std::true_type has_offsets;
    constexpr std::false_type has_none;
    if (matrix.num_bits == 8) return matrix.offsets ? use(Bytes8{}, has_offsets) : use(Bytes8{}, has_none);
    if (matrix.num_bits == 6) return use(Planes6{}, has_none);
    if (matrix.num_bits == 5) return use(Planes5{}, has_offsets);
    if (matrix.num_bits == 3) return use(Planes3{}, has_none);
    if (matrix.num_bits == 2) return use(Planes2{}, has_offsets);
    if (matrix.table) return use(Codes4{}, has_none);
    if (matrix.steps) return use(SteppedHalves4{}, has_offsets);
    return matrix.offsets ? use(Halves4{}, has_offsets) : use(Halves4{}, has_none);
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

// The `WIDTH` bits from `from` on of each byte, which are moved to the bits from `TO` on.
template <int WIDTH, int TO> INLINE u32x16 field_of(u32x16 bytes, int from) {
    constexpr uint32_t MASK = 0x01010101u * (((1u << WIDTH) - 1) << TO);
    return (from < TO ? bytes << (TO - from) : bytes >> (from - TO)) & MASK;
}

// The bits of a value that the first plane has, of weights in planes. It has as many lines, and so has the second plane.
constexpr int low_bits_of(int bits) { return bits > 4 ? 4 : 2; }

// The words of a group in planes: the lower bits of all of them, then the others.
template <class Format>
INLINE void join_planes(const u32x16 (&lines)[Format::STORED_BITS], u32x16 (&words)[GROUP_WORDS]) {
    constexpr int LOW = low_bits_of(Format::STORED_BITS), HIGH = Format::STORED_BITS - LOW;
    constexpr int SHARING = 8 / LOW, UP = __builtin_ctz(Format::TIMES);
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w++) {
        words[w] = field_of<LOW, UP>(lines[w / SHARING], w % SHARING * LOW);
        if constexpr (HIGH > 0) {
            constexpr int OTHERS = 8 / HIGH;
            words[w] = words[w] | field_of<HIGH, UP + LOW>(lines[LOW + w / OTHERS], w % OTHERS * HIGH);
        }
    }
}

// `ahead`: the distance to the same place in the next panels, which is prefetched into the second-level cache.
template <class Format>
INLINE void load_words(const char* from, int64_t ahead, const uint8_t* table, u32x16 (&words)[GROUP_WORDS]) {
    constexpr int LINES = Format::STORED_BITS, SHARING = GROUP_WORDS / LINES;
    const auto load_line = [=](int i) {
        __builtin_prefetch(from + i * 64 + ahead, 0, 2);
        return load<u32x16>(from + i * 64);
    };
    if constexpr (LINES != GROUP_WORDS && LINES != 4) {
        u32x16 lines[LINES];
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++) lines[i] = load_line(i);
        join_planes<Format>(lines, words);
    } else {
#pragma GCC unroll 8
        for (int w = 0; w < GROUP_WORDS; w += SHARING) {
            const u32x16 line = load_line(w / SHARING);
            if constexpr (SHARING == 1) {
                words[w] = as_factor(line);
            } else if constexpr (Format::BITS == 8) {
                words[w] = as_factor(look_up(field_of<4, 0>(line, 0), table));
                words[w + 1] = as_factor(look_up(field_of<4, 0>(line, 4), table));
            } else {
                words[w] = field_of<4, HALVES_UP>(line, 0);
                words[w + 1] = field_of<4, HALVES_UP>(line, 4);
            }
        }
    }
}
