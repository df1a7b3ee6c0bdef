// The sums of a group's products, scaled and added to C.
#pragma once

#include "level.h"

// A register of the scales and offsets of a group of each panel.
template <int PANELS, int SCALES> struct ScaleRegisters {
    f32_register scales[PANELS][SCALES], offsets[PANELS][SCALES];
};

// Adds the products of a row's group with a register of columns, one for each scale, to elements of C.
template <bool HAS_OFFSETS, int SCALES>
INLINE void add_scaled(const Group& group, const i32_register (&dots)[SCALES], const f32_register (&scales)[SCALES],
                       const f32_register (&offsets)[SCALES], float* to) {
    f32_register product = scaled(dots[0], scales[0]);
    if (SCALES > 1) product += scaled(dots[SCALES - 1], scales[SCALES - 1]);
    f32_register sum = fma16(group.scale - f32_register{}, product, load<f32_register>(to));
    if (HAS_OFFSETS)
        for (int s = 0; s < SCALES; s++)
            sum = fma16(group.template sum_of<SCALES>(s) - f32_register{}, offsets[s], sum);
    store_raw(to, sum);
}

template <int BITS, bool HAS_OFFSETS> constexpr bool IS_AROUND_ZERO = BITS == 8 || !HAS_OFFSETS;

// Adds the products of some rows' group with `words` to elements of C.
template <int BITS, bool HAS_OFFSETS, int ROWS, int PANELS, int SCALES>
INLINE void add_group(const Group* groups, const u32_register (&words)[PANELS][GROUP_WORDS],
                      const ScaleRegisters<PANELS, SCALES>& by, float* c, int64_t ldc) {
    i32_register dots[ROWS][PANELS][SCALES];
    multiply_group<BITS>(groups, words, IS_AROUND_ZERO<BITS, HAS_OFFSETS>, dots);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
            add_scaled<HAS_OFFSETS>(groups[r], dots[r][p], by.scales[p], by.offsets[p], c + r * ldc + p * LANES);
}
