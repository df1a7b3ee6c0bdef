// What levels have in common that multiply signed bytes, into which 4 bits fit as they are.
#pragma once

#include "group.h"

constexpr int HALVES_UP = 0;  // how far 4 bits are shifted up: not at all

// The products of some rows' group with a register of columns.
template <int BITS, int ROWS>
INLINE void multiply_group(const Group* groups, const u32_register (&b)[1][GROUP_WORDS], bool has_shift,
                           i32_register (&dots)[ROWS][1]) {
    i32_register sums[ROWS];
    multiply_register<BITS>(groups, b[0], sums);
    for (int r = 0; r < ROWS; r++)
        dots[r][0] = BITS == 4 && has_shift ? sums[r] + (groups[r].shift - i32_register{}) : sums[r];
}

// Makes unsigned bytes signed.
INLINE u32x16 as_factor(u32x16 bytes) { return bytes ^ 0x80808080u; }
