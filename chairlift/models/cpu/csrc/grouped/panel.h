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
// With 5 or 6 bits each 32 elements of a column have two planes: 4 lines of their lower 4 bits, as above, and then as
// many lines as there are further bits, where a byte has those of several words, from its lowest bits on. Values are
// multiplied as they are. 6 bits have no offsets: 32 stands for zero, and a scale is of 16 neighbours. 3 bits are
// likewise, with 2 bits in the first plane; 4 stands for zero, and they are multiplied as 8 times themselves. 2 bits have
// one plane, and a scale and an offset for 16 neighbours, which share a byte: the scale is in its low half.
//
// Scales and offsets are multiples of their column's unit: float16 or unsigned bytes. As a byte a scale is the byte,
// and an offset -240 times the byte. (With scales up to 255 units, weights on both sides of 0 need offsets from 0 down
// to -15 * 16 times as much.) Without offsets a byte is a power of two, as its exponent plus 127; of 0 it is 0.
//
// With steps both are bytes: multiples of a step that neighbours along the depth share, which is float16 and itself in
// units. Without offsets the bytes are signed. Steps are [depth / group_size / scales_per_step][2][16] for a panel:
// those of its scales, then of its offsets, if it has some.
#pragma once

#include "scales.h"

// The words of the columns from `lane` on, as they are multiplied.
INLINE void select_columns(const u32x16 (&all)[GROUP_WORDS], int lane, u32_register (&words)[GROUP_WORDS]) {
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w++) words[w] = register_of<u32_register>(all[w], lane);
    arrange(words);
}

// The byte of an element of a group as it is multiplied. `group`: the first byte of its column there.
template <class Format> INLINE int32_t byte_of(const uint8_t* group, int64_t element, const uint8_t* table) {
    constexpr int LINES = Format::STORED_BITS, LINE = 4 * LANES;
    const int64_t word = element / 4;
    const uint8_t* bytes = group + element % 4;
    if (LINES == GROUP_WORDS) return bytes[word * LINE];
    const auto field = [&](int first, int width) {
        const int64_t sharing = 8 / width;
        return bytes[(first + word / sharing) * LINE] >> (word % sharing * width) & ((1 << width) - 1);
    };
    if (LINES == 4) return Format::BITS == 8 ? table[field(0, 4)] : Format::TIMES * field(0, 4);
    constexpr int LOW = low_bits_of(LINES);
    const int32_t high = LINES > LOW ? field(LOW, LINES > LOW ? LINES - LOW : 1) : 0;
    return Format::TIMES * (field(0, LOW) | high << LOW);
}

// Reads `count` weights of a column.
template <class Format, bool HAS_OFFSETS>
static void read_column_of(const Matrix& matrix, int64_t column, int64_t count, float* to) {
    constexpr int64_t GROUP_BYTES = GROUP * LANES * Format::STORED_BITS / 8;
    const int64_t lane = column % LANES, panel = column / LANES;
    const uint8_t* from = static_cast<const uint8_t*>(matrix.panels) + panel * matrix.depth / GROUP * GROUP_BYTES;
    const float unit = matrix.units[column];
    ScaleReader<Format, HAS_OFFSETS, 1> reader(matrix, panel, 0, 0);
    GroupScales<1, Format::SCALES> read;
    float scales[Format::SCALES][LANES], offsets[Format::SCALES][LANES];
    for (int64_t k = 0; k < count; k++) {
        const int64_t element = k % GROUP;
        if (element == 0) {
            reader.next(read);
            for (int s = 0; s < Format::SCALES; s++) {
                store16(scales[s], read.scales[0][s] * unit);
                store16(offsets[s], read.offsets[0][s] * unit);
            }
        }
        const int32_t byte = byte_of<Format>(from + k / GROUP * GROUP_BYTES + lane * 4, element, matrix.table);
        const int64_t part = element * Format::SCALES / GROUP;
        to[k] = scales[part][lane] * float(byte - ZERO_OF<Format, HAS_OFFSETS>) + offsets[part][lane];
    }
}

inline void read_column(const Matrix& matrix, int64_t column, int64_t count, float* to, const Group*) {
    with_format(matrix, [&](auto format, auto has_offsets) {
        read_column_of<decltype(format), decltype(has_offsets)::value>(matrix, column, count, to);
    });
}
