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
template <int BITS, bool HAS_OFFSETS, int PANELS>
INLINE void add_rows(const GroupedRows& a, int64_t place, int rows, uint32_t residuals,
                     const u32_register (&words)[PANELS][GROUP_WORDS], const f32_register (&scales)[PANELS],
                     const f32_register (&offsets)[PANELS], float* c, int64_t ldc) {
    const Group* groups = a.groups + place;
    int r = 0;
#if defined(__AMX_INT8__)
    if (rows >= FEWEST_TILED_ROWS) {
        add_tiled<BITS, HAS_OFFSETS>(groups, rows, words, scales, offsets, c, ldc);
        r = rows;
    }
#endif
    for (; r + GROUPS_AT_ONCE <= rows; r += GROUPS_AT_ONCE)
        add_group<BITS, HAS_OFFSETS, GROUPS_AT_ONCE>(groups + r, words, scales, offsets, c + r * ldc, ldc);
    for (; r < rows; r++)
        add_group<BITS, HAS_OFFSETS, 1>(groups + r, words, scales, offsets, c + r * ldc, ldc);
    for (; residuals; residuals &= residuals - 1) {
        const int row = __builtin_ctz(residuals);
        add_group<BITS, HAS_OFFSETS, 1>(a.residuals + place + row, words, scales, offsets, c + row * ldc, ldc);
    }
}

// C [rows, 16 PANELS] (row stride ldc) = A B, from a panel on.
template <class Format, bool HAS_OFFSETS, int PANELS>
static void multiply_groups(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, float* c,
                            int64_t ldc) {
    constexpr int64_t GROUP_BYTES = GROUP * LANES * Format::STORED_BITS / 8;
    const int64_t panel_bytes = matrix.depth / GROUP * GROUP_BYTES;
    const int64_t panel_scales = matrix.depth / matrix.group_size * LANES;
    const char* b = static_cast<const char*>(matrix.panels) + panel * panel_bytes;
    [[maybe_unused]] const int64_t panel_runs =
        Format::HAS_STEPS ? panel_scales / LANES / matrix.scales_per_step : 0;
    [[maybe_unused]] int64_t run = panel * panel_runs, left_of_run = 0;
    [[maybe_unused]] Steps steps[PANELS] = {};
    int64_t scale = panel * panel_scales, place = 0;
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < PANELS; p++) store16(c + r * ldc + p * LANES, f32x16{});
#if defined(__AMX_INT8__)
    if (rows >= FEWEST_TILED_ROWS) shape_tiles(rows > 16 ? 16 : rows, rows > 16 ? rows - 16 : 16, GROUP);
#endif
    for (int64_t start = 0; start < matrix.depth; start += matrix.group_size, scale += LANES) {
        f32x16 all_scales[PANELS], all_offsets[PANELS] = {};
        if constexpr (Format::HAS_STEPS) {
            if (!left_of_run) {
                for (int p = 0; p < PANELS; p++)
                    steps[p] = load_steps(matrix, run + p * panel_runs, PANELS * panel_runs * 2 * LANES);
                left_of_run = matrix.scales_per_step, run++;
            }
            left_of_run--;
        }
        for (int p = 0; p < PANELS; p++) {
            const int64_t at = scale + p * panel_scales, ahead = PANELS * panel_scales;
            if constexpr (Format::HAS_STEPS) {
                all_scales[p] = load_ahead<uint8_t>(matrix.scales, at, ahead) * steps[p].scale;
                all_offsets[p] = load_ahead<uint8_t>(matrix.offsets, at, ahead) * steps[p].offset;
            } else {
                all_scales[p] = load_scales(matrix, at, ahead);
                if (HAS_OFFSETS) all_offsets[p] = load_offsets(matrix, at, ahead);
            }
        }
        for (int64_t k = 0; k < matrix.group_size; k += GROUP, b += GROUP_BYTES, place += a.stride) {
            const uint32_t residuals = a.residuals_of(place, rows);
            u32x16 all_words[PANELS][GROUP_WORDS];
            for (int p = 0; p < PANELS; p++)
                load_words<Format>(b + p * panel_bytes, PANELS * panel_bytes, matrix.table, all_words[p]);
            // One register of columns at a time: then the group's words stay in registers from row to row.
#pragma GCC unroll 4
            for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {
                u32_register words[PANELS][GROUP_WORDS];
                f32_register scales[PANELS], offsets[PANELS];
                for (int p = 0; p < PANELS; p++) {
                    select_columns(all_words[p], lane, words[p]);
                    scales[p] = register_of<f32_register>(all_scales[p], lane);
                    offsets[p] = register_of<f32_register>(all_offsets[p], lane);
                }
                add_rows<Format::BITS, HAS_OFFSETS>(a, place, rows, residuals, words, scales, offsets, c + lane, ldc);
            }
        }
    }
}

template <class Format, bool HAS_OFFSETS>
static void multiply_format(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, int panels, float* c,
                            int64_t ldc) {
    int p = 0;
    for (; p + PANELS_AT_ONCE <= panels; p += PANELS_AT_ONCE)
        multiply_groups<Format, HAS_OFFSETS, PANELS_AT_ONCE>(a, rows, matrix, panel + p, c + p * LANES, ldc);
    if (p < panels) multiply_groups<Format, HAS_OFFSETS, 1>(a, rows, matrix, panel + p, c + p * LANES, ldc);
}

// Multiplies by `panels` panels, and then by the units.
static void multiply(const GroupedRows& a, int rows, const Matrix& matrix, int64_t panel, int panels, float* c,
                     int64_t ldc) {
    auto format = multiply_format<Codes4, false>;
    if (matrix.num_bits == 8)
        format = matrix.offsets ? multiply_format<Bytes8, true> : multiply_format<Bytes8, false>;
    else if (matrix.steps)
        format = multiply_format<SteppedHalves4, true>;
    else if (!matrix.table)
        format = matrix.offsets ? multiply_format<Halves4, true> : multiply_format<Halves4, false>;
    format(a, rows, matrix, panel, panels, c, ldc);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < panels * LANES; k += LANES)
            store16(c + r * ldc + k, load16(c + r * ldc + k) * load16(matrix.units + panel * LANES + k));
}
