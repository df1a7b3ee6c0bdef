// The product of rows in groups with weights in groups: panel.h draws the weights, group.h describes the rows, and
// level.h names the room of each instruction set.
//
// The sum over 32 products of integers is exact; what groups add to an element of C is one chain of additions over the
// depth, as in product/product.h.
#pragma once

#include "panel.h"
#include "scaled.h"

#if defined(__AMX_INT8__)
#include "amx.h"
#endif

// Adds the products of all rows' groups at `place`, and of their residuals, with `words` to C.
template <int BITS, bool HAS_OFFSETS, int PANELS, int SCALES>
INLINE void add_rows(const GroupedRows& a, int64_t place, int rows, uint32_t residuals,
                     const u32_register (&words)[PANELS][GROUP_WORDS], const ScaleRegisters<PANELS, SCALES>& by,
                     float* c, int64_t ldc) {
    // Sums for two scales take twice as many registers.
    constexpr int TOGETHER = GROUPS_AT_ONCE > 2 ? GROUPS_AT_ONCE / SCALES : GROUPS_AT_ONCE;
    const Group* groups = a.groups + place;
    int r = 0;
#if defined(__AMX_INT8__)
    if constexpr (SCALES == 1)
        if (rows >= FEWEST_TILED_ROWS) {
            add_tiled<BITS, HAS_OFFSETS>(groups, rows, words, by, c, ldc);
            r = rows;
        }
#endif
    for (; r + TOGETHER <= rows; r += TOGETHER)
        add_group<BITS, HAS_OFFSETS, TOGETHER>(groups + r, words, by, c + r * ldc, ldc);
    for (; r < rows; r++) add_group<BITS, HAS_OFFSETS, 1>(groups + r, words, by, c + r * ldc, ldc);
    for (; residuals; residuals &= residuals - 1) {
        const int row = __builtin_ctz(residuals);
        add_group<BITS, HAS_OFFSETS, 1>(a.residuals + place + row, words, by, c + row * ldc, ldc);
    }
}

// C [rows, 16 PANELS] (row stride ldc) = A B, from a panel on. `ahead`: the distance to the panels that are prefetched.
template <class Format, bool HAS_OFFSETS, int PANELS>
static void multiply_groups(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, int64_t ahead,
                            float* c, int64_t ldc) {
    constexpr int64_t GROUP_BYTES = GROUP * LANES * Format::STORED_BITS / 8;
    constexpr int SCALES = Format::SCALES;
    const int64_t panel_bytes = matrix.depth / GROUP * GROUP_BYTES;
    const char* b = static_cast<const char*>(matrix.panels) + panel * panel_bytes;
    ScaleReader<Format, HAS_OFFSETS, PANELS> reader(matrix, panel, 0, ahead);
    GroupScales<PANELS, SCALES> all;
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PANELS; p++) store16(c + r * ldc + p * LANES, f32x16{});
#if defined(__AMX_INT8__)
    if (SCALES == 1 && rows >= FEWEST_TILED_ROWS)
        shape_tiles(rows > 16 ? 16 : rows, rows > 16 ? rows - 16 : 16, GROUP);
#endif
    for (int64_t k = 0, place = 0; k < matrix.depth; k += GROUP, b += GROUP_BYTES, place += a.stride) {
        const uint32_t residuals = a.residuals_of(place, rows);
        u32x16 all_words[PANELS][GROUP_WORDS];
        reader.next(all);
        for (int p = 0; p < PANELS; p++)
            load_words<Format>(b + p * panel_bytes, ahead * panel_bytes, matrix.table, all_words[p]);
        // One register of columns at a time: then the group's words stay in registers from row to row.
#pragma GCC unroll 4
        for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {
            u32_register words[PANELS][GROUP_WORDS];
            ScaleRegisters<PANELS, SCALES> by;
            for (int p = 0; p < PANELS; p++) {
                select_columns(all_words[p], lane, words[p]);
                for (int s = 0; s < SCALES; s++) {
                    by.scales[p][s] = register_of<f32_register>(all.scales[p][s], lane);
                    by.offsets[p][s] = register_of<f32_register>(all.offsets[p][s], lane);
                }
            }
            add_rows<Format::BITS, HAS_OFFSETS>(a, place, rows, residuals, words, by, c + lane, ldc);
        }
    }
}

template <class Format, bool HAS_OFFSETS>
static void multiply_format(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, int panels,
                            int64_t panels_ahead, float* c, int64_t ldc) {
    int p = 0;
    const auto ahead = [&](int width) { return p + width < panels ? width : panels_ahead - p; };
    for (; p + PANELS_AT_ONCE <= panels; p += PANELS_AT_ONCE)
        multiply_groups<Format, HAS_OFFSETS, PANELS_AT_ONCE>(a, rows, matrix, panel + p, ahead(PANELS_AT_ONCE),
                                                             c + p * LANES, ldc);
    if (p < panels)
        multiply_groups<Format, HAS_OFFSETS, 1>(a, rows, matrix, panel + p, ahead(1), c + p * LANES, ldc);
}

// Multiplies by `panels` panels, and then by the units. `panels_ahead`: see `Prefetch`.
static void multiply(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, int panels, float* c,
                     int64_t ldc, int64_t panels_ahead = 0) {
    const auto format = with_format(matrix, [](auto format, auto has_offsets) {
        return multiply_format<decltype(format), decltype(has_offsets)::value>;
    });
    format(a, rows, matrix, panel, panels, panels_ahead ? panels_ahead : panels, c, ldc);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < panels * LANES; k += LANES)
            store16(c + r * ldc + k, load16(c + r * ldc + k) * load16(matrix.units + panel * LANES + k));
}
