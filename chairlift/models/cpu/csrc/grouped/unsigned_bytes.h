// What levels have in common that multiply unsigned bytes of weights by signed bytes of rows.
#pragma once

#include "group.h"

constexpr int HALVES_UP = 4;  // 4 bits are multiplied as 16 times their value

// The products of some rows' group with a register of columns of each panel, one for each scale.
template <int BITS, int ROWS, int PANELS, int SCALES>
INLINE void multiply_group(const Group* groups, const u32_register (&b)[PANELS][GROUP_WORDS], bool has_shift,
                           i32_register (&dots)[ROWS][PANELS][SCALES]) {
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++)
            for (int s = 0; s < SCALES; s++)
                dots[r][p][s] = (has_shift ? groups[r].template shift_of<SCALES>(s) : START) - i32_register{};
#pragma GCC unroll 8
    for (int w = 0; w < GROUP_WORDS; w++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++)
                multiply_add(dots[r][p][w * SCALES / GROUP_WORDS], groups[r].values + 4 * w, b[p][w]);
}

INLINE u32x16 as_factor(u32x16 bytes) { return bytes; }

INLINE void arrange(u32_register (&)[GROUP_WORDS]) {}
