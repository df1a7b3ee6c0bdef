// Rows of weights, transposed into panels (product/panel.h, grouped/panel.h), word by word of 32 bits.
#pragma once

#include <cstring>

#include "../vector/lanes.h"

struct AsTheyAre {
    uint32_t operator()(uint32_t word) const { return word; }
};

// Four signed bytes become unsigned ones around 128.
struct AroundZero {
    uint32_t operator()(uint32_t word) const { return word ^ 0x80808080u; }
};

// Eight neighbours of 4 bits, two in each byte: the first four in low halves, the others in the high halves beside them.
struct FoldedHalves {
    uint32_t operator()(uint32_t word) const {
        const uint32_t first = (word & 0xff) | (word & 0xff00) << 8, second = (word >> 16 & 0xff) | (word >> 24) << 16;
        return (first & 0x000f000f) | (first & 0x00f000f0) << 4 | (second & 0x000f000f) << 4 |
               (second & 0x00f000f0) << 8;
    }
};

// Writes the panels of some rows, of which the last panel may have fewer than it has places; the others are 0.
template <class Change>
void write_panels(const uint32_t* rows, int64_t num_rows, int64_t num_words, int64_t stride, uint32_t* to, Change change) {
    for (int64_t first = 0; first < num_rows; first += LANES, to += num_words * LANES) {
        const int64_t count = num_rows - first < LANES ? num_rows - first : LANES;
        if (count < LANES) std::memset((void*)to, 0, size_t(num_words * LANES) * sizeof(uint32_t));
        for (int64_t begin = 0; begin < num_words; begin += LANES) {
            const int64_t end = num_words - begin < LANES ? num_words : begin + LANES;
            for (int64_t row = 0; row < count; row++)
                for (int64_t word = begin; word < end; word++)
                    to[word * LANES + row] = change(rows[(first + row) * stride + word]);
        }
    }
}
