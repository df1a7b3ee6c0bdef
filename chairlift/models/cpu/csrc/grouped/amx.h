// AMX: tiles of integers for up to 32 rows.
#pragma once

#include "../product/tiles.h"
#include "scaled.h"

// With fewer rows, storing and reloading tiles takes as long as they save. (Estimated in cycles.)
constexpr int FEWEST_TILED_ROWS = 8;

// `add_group` for up to 32 rows: tiles of 16 rows of a group, whose 8 words match the lines of a panel's. The integers
// are the same, and so the result is the same, bit for bit.
template <int BITS, bool HAS_OFFSETS, int PANELS>
INLINE void add_tiled(const Group* groups, int rows, const u32_register (&words)[PANELS][GROUP_WORDS],
                      const ScaleRegisters<PANELS, 1>& by, float* c, int64_t ldc) {
    constexpr int64_t STRIDE = PANELS * LANES * sizeof(int32_t);
    alignas(64) int32_t dots[32][PANELS * LANES];
    u32_register lines[PANELS][GROUP_WORDS];  // a copy, so that fewer rows can keep their words in registers
    for (int p = 0; p < PANELS; p++)
        for (int w = 0; w < GROUP_WORDS; w++) lines[p][w] = words[p][w];
    const bool has_second = rows > 16;
    finish_stores();
    _tile_loadd(6, lines[0], 64);
    if (PANELS > 1) _tile_loadd(7, lines[PANELS - 1], 64);
    _tile_loadd(4, groups->values, sizeof(Group));
    _tile_zero(0);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(0, dots[0], STRIDE);
    if (PANELS > 1) {
        _tile_zero(1);
        _tile_dpbsud(1, 4, 7);
        _tile_stored(1, dots[0] + LANES, STRIDE);
    }
    if (has_second) {
        _tile_loadd(5, groups[16].values, sizeof(Group));
        _tile_zero(2);
        _tile_dpbsud(2, 5, 6);
        _tile_stored(2, dots[16], STRIDE);
        if (PANELS > 1) {
            _tile_zero(3);
            _tile_dpbsud(3, 5, 7);
            _tile_stored(3, dots[16] + LANES, STRIDE);
        }
    }
    finish_stores();
    for (int r = 0; r < rows; r++) {
        const i32x16 shift = (IS_AROUND_ZERO<BITS, HAS_OFFSETS> ? groups[r].shift : START) - i32x16{};
        for (int p = 0; p < PANELS; p++) {
            const i32x16 shifted[1] = {load<i32x16>(dots[r] + p * LANES) + shift};
            add_scaled<HAS_OFFSETS>(groups[r], shifted, by.scales[p], by.offsets[p], c + r * ldc + p * LANES);
        }
    }
}
