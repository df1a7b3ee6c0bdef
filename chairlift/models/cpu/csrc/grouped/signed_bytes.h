// What levels have in common that multiply signed bytes, into which fewer than 8 bits fit as they are.
#pragma once

#include "group.h"

constexpr int HALVES_UP = 0;  // how far 4 bits are shifted up: not at all

// The products of some rows' group with a register of columns, one for each scale.
template <int BITS, int ROWS, int SCALES>
INLINE void multiply_group(const Group* groups, const u32_register (&b)[1][GROUP_WORDS], bool has_shift,
                           i32_register (&dots)[ROWS][1][SCALES]) {
    i32_register sums[ROWS][SCALES];
    multiply_register<BITS>(groups, b[0], sums);
    for (int r = 0; r < ROWS; r++)
        for (int s = 0; s < SCALES; s++) {
            dots[r][0][s] = sums[r][s];
            if (BITS < 8 && has_shift) dots[r][0][s] += groups[r].template shift_of<SCALES>(s) - i32_register{};
        }
}

// Makes unsigned bytes signed.
INLINE u32x16 as_factor(u32x16 bytes) { return bytes ^ 0x80808080u; }
