// Products with weights, shared among threads.
#pragma once

#include "model.h"
#include "rows.h"
#include "team.h"

constexpr int TWO_TILES_LINES = 32;  // cache lines of weights per step of a product
constexpr int UNIT_PANELS = 4;          // of a unit, which a thread multiplies at a time: 64 columns
constexpr int64_t CACHE_BYTES = 1 << 20;  // of a thread's own cache: limit for rows while weights are streamed

// From this many rows per thread on, each thread has rows of its own, which stay in its cache from one product to the
// next, and reads all weights for them; with fewer, reading the weights twice takes longer than fetching rows.
constexpr int64_t MANY_ROWS = 192;

// x W^T + b of all rows, unit by unit: `use(column, row, count, c, stride)` gets float32 tiles of the result.
template <class W, class Use>
void linear(Team& team, const Matrix& matrix, const Rows<W>& x, int64_t num_rows, int unit_panels, Use use) {
    CHECK(reinterpret_cast<uintptr_t>(matrix.panels) % 64 == 0);
    const int64_t depth = matrix.depth, panels = pad(matrix.columns, LANES) / LANES;
    const int64_t units = (panels + unit_panels - 1) / unit_panels;
    const int64_t fitting = pad(CACHE_BYTES / (depth * Rows<W>::ELEMENT_BYTES), ROWS_AT_ONCE);
    const bool is_by_rows = num_rows >= MANY_ROWS * team.size;
    const int64_t share = is_by_rows ? pad((num_rows + team.size - 1) / team.size, ROWS_AT_ONCE) : num_rows;
    const int64_t block_rows = share < fitting ? share : fitting;
    const int64_t blocks = (num_rows + block_rows - 1) / block_rows;
    const int stride = unit_panels * LANES;
    team.share(blocks * units, [&](int64_t task) {
        alignas(64) float c[ROWS_AT_ONCE * MOST_HEAD_DIM];
        const int64_t unit = task % units, start = task / units * block_rows;
        const int64_t end = start + block_rows < num_rows ? start + block_rows : num_rows;
        const int64_t column = unit * stride;
        const int width = unit_panels < panels - unit * unit_panels ? unit_panels : int(panels - unit * unit_panels);
        // The next unit's weights are prefetched while this one's are multiplied, a share with each block of rows.
        const int64_t steps = (end - start + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        const int64_t unit_bytes = stride * depth * Rows<W>::PREFETCHED_BYTES, slice = pad(unit_bytes / steps, 64);
        const int lines_per_step = steps > 1 ? int((TWO_TILES_LINES + steps - 1) / steps) : 0;
        const char* next = static_cast<const char*>(matrix.panels) + (unit + 1) * unit_bytes;
        for (int64_t row = start; row < end; row += ROWS_AT_ONCE) {
            const int count = end - row < ROWS_AT_ONCE ? int(end - row) : ROWS_AT_ONCE;
            x.multiply_by(matrix, row, count, unit * unit_panels, width, c, stride,
                          {row == start, next, lines_per_step, slice});
            next += slice;
            if (matrix.bias)
                for (int p = 0; p < width * LANES; p += LANES)
                    for (int r = 0; r < count; r++)
                        store16(c + r * stride + p, load16(c + r * stride + p) + load16(matrix.bias + column + p));
            use(column, row, count, c, stride, width * LANES);
        }
    });
}
