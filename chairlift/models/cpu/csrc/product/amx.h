// The product of bfloat16 in tiles: up to 32 rows and two panels at a time.
#pragma once

#include "panel.h"
#include "prefetch.h"
#include "tiles.h"

template <bool TWO_ROW_TILES, bool TWO_PANELS>
INLINE void multiply_tiles(const bf16* a, int64_t lda, const bf16* b, int64_t depth, float* c, int64_t ldc,
                           bool is_first, Prefetch& prefetch) {
    constexpr int64_t STEP = 64 / sizeof(bf16), TILE = 1024 / sizeof(bf16);
    const int64_t panel_size = depth * LANES, stride = lda * sizeof(bf16), c_stride = ldc * 4;
    finish_stores();
    _tile_zero(0);
    if (TWO_PANELS) _tile_zero(1);
    if (TWO_ROW_TILES) _tile_zero(2);
    if (TWO_ROW_TILES && TWO_PANELS) _tile_zero(3);
    for (int64_t k = 0; k < depth; k += STEP, b += TILE) {
        if (is_first)  // the others find it in the cache
#pragma GCC unroll 16
            for (int line = 0; line < 16; line++) {
                constexpr int64_t AHEAD = TWO_ROW_TILES ? FAR_PREFETCH_BYTES : PREFETCH_BYTES;
                constexpr int LEVEL = TWO_ROW_TILES ? 2 : 3;  // the first-level cache has no room so far ahead
                __builtin_prefetch((const char*)b + AHEAD + line * 64, 0, LEVEL);
                if (TWO_PANELS) __builtin_prefetch((const char*)(b + panel_size) + AHEAD + line * 64, 0, LEVEL);
            }
        for (int i = 0; i < prefetch.lines_per_step; i++, prefetch.next += 64) __builtin_prefetch(prefetch.next, 0, 2);
        _tile_stream_loadd(6, b, 64);  // the first-level cache is kept for A
        if (TWO_PANELS) _tile_stream_loadd(7, b + panel_size, 64);
        _tile_loadd(4, a + k, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_PANELS) _tile_dpbf16ps(1, 4, 7);
        if (TWO_ROW_TILES) {
            _tile_loadd(5, a + 16 * lda + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (TWO_PANELS) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_stride);
    if (TWO_PANELS) _tile_stored(1, c + LANES, c_stride);
    if (TWO_ROW_TILES) _tile_stored(2, c + 16 * ldc, c_stride);
    if (TWO_ROW_TILES && TWO_PANELS) _tile_stored(3, c + 16 * ldc + LANES, c_stride);
}

static void multiply(const bf16* a, int64_t lda, int rows, const bf16* b, int panels, int64_t depth, float* c,
                     int64_t ldc, Prefetch prefetch = {}) {
    constexpr int64_t STEP = 64 / sizeof(bf16);  // a tile's depth; heads need not be multiples of it
    if (depth % STEP) return multiply_vectors(a, lda, rows, b, panels, depth, c, ldc, prefetch);
    for (int r = 0; r < rows; r += 32) {
        const int left = rows - r < 32 ? rows - r : 32;
        shape_tiles(left < 16 ? left : 16, left > 16 ? left - 16 : 16);
        for (int p = 0; p < panels; p += 2) {
            const bf16* part = b + p * depth * LANES;
            const bf16* from = a + r * lda;
            float* to = c + r * ldc + p * LANES;
            const bool is_first = prefetch.is_first && r == 0;
            if (left > 16 && panels - p > 1)
                multiply_tiles<true, true>(from, lda, part, depth, to, ldc, is_first, prefetch);
            else if (left > 16)
                multiply_tiles<true, false>(from, lda, part, depth, to, ldc, is_first, prefetch);
            else if (panels - p > 1)
                multiply_tiles<false, true>(from, lda, part, depth, to, ldc, is_first, prefetch);
            else
                multiply_tiles<false, false>(from, lda, part, depth, to, ldc, is_first, prefetch);
        }
    }
}
