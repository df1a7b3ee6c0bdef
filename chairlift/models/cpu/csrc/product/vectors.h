// The product in vectors, on any machine: registers hold the sums of ROWS x PANELS vectors of C.
#pragma once

#include "multiply_add.h"
#include "panel.h"
#include "prefetch.h"

constexpr int64_t MOST_DEPTH_BYTES = 8192;  // at a time, so that rows and panels of it stay in the second-level cache

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12, MOST_PANELS = 2, FEW_ROWS = 4, FEW_ROWS_PANELS = 4;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 5, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 4;
#elif defined(__aarch64__)
constexpr int MOST_ROWS = 5, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 2;
#else
constexpr int MOST_ROWS = 2, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 2;
#endif

// Where the next lines are prefetched: the address advances by `step` bytes, up to a line, at each step of the depth.
struct NextLines {
    const char* from;
    int64_t step;
};

// Multiplies `depth` elements of rows of A and of panels that are `panel_size` elements apart; `is_more`: adds to C.
//
// The panels that come next are fetched meanwhile, into the second level, at the same place of each: a distance in bytes
// would end in the neighbouring panel, which is at hand already.
template <int ROWS, int PANELS, class A, class T>
INLINE void multiply_block(const A* a, int64_t lda, const T* b, int64_t panel_size, int64_t depth, bool is_more,
                           NextLines& next, float* c, int64_t ldc) {
    f32x16 sum[ROWS][PANELS] = {};
    if (is_more)
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) sum[r][p] = load16(c + r * ldc + p * LANES);
    RowPointers<A, ROWS> rows(a, lda);
    NextLines own = next;
    for (int64_t k = 0; k < depth; k += Pack<T>, rows.advance(Pack<T>), own.from += own.step) {
        typename Factor<T>::type words[PANELS];
        for (int p = 0; p < PANELS; p++) {
            const T* from = b + p * panel_size + k * LANES;
            words[p] = load<typename Factor<T>::type>(from);
            __builtin_prefetch(from + PANELS * panel_size, 0, 2);
        }
        if (ROWS > FEW_ROWS) __builtin_prefetch(own.from, 0, 2);
        add_products<0, Pack<T>>(sum, rows, words);
    }
    next = own;
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store16(c + r * ldc + p * LANES, sum[r][p]);
}

// Multiplies `rows` rows, up to MOST_ROWS, with one instance of the block for each number.
template <int ROWS, int PANELS, class A, class T>
INLINE void multiply_rows(int rows, const A* a, int64_t lda, const T* b, int64_t panel_size, int64_t depth,
                          bool is_more, NextLines& next, float* c, int64_t ldc) {
    if (rows == ROWS)
        multiply_block<ROWS, PANELS>(a, lda, b, panel_size, depth, is_more, next, c, ldc);
    else if constexpr (ROWS > 1)
        multiply_rows<ROWS - 1, PANELS>(rows, a, lda, b, panel_size, depth, is_more, next, c, ldc);
}

// C [rows, 16 panels] (row stride ldc) = A [rows, depth] (row stride lda) B, or adds that to C: up to MOST_ROWS rows.
template <class A, class T>
static void multiply_panels(const A* a, int64_t lda, int rows, const T* b, int panels, int64_t panel_size,
                            int64_t depth, bool is_more, NextLines& next, float* c, int64_t ldc) {
    for (int p = 0; p < panels;) {
        const T* part = b + p * panel_size;
        const bool is_wide = rows <= FEW_ROWS && panels - p >= FEW_ROWS_PANELS;
        const int width = is_wide ? FEW_ROWS_PANELS : panels - p >= MOST_PANELS ? MOST_PANELS : 1;
        float* to = c + p * LANES;
        if (is_wide)
            multiply_rows<FEW_ROWS, FEW_ROWS_PANELS>(rows, a, lda, part, panel_size, depth, is_more, next, to, ldc);
        else if (width == MOST_PANELS)
            multiply_rows<MOST_ROWS, MOST_PANELS>(rows, a, lda, part, panel_size, depth, is_more, next, to, ldc);
        else
            multiply_rows<MOST_ROWS, 1>(rows, a, lda, part, panel_size, depth, is_more, next, to, ldc);
        p += width;
    }
}

// With several blocks of rows, the first waits for memory and the others compute: so the next weights are prefetched
// evenly, some with each step of the depth.
INLINE NextLines share_lines(const Prefetch& prefetch, int blocks, int panels, int64_t words, const void* b) {
    if (blocks == 1 || !prefetch.bytes) return {(const char*)b, 0};
    const int64_t steps = blocks * ((panels + MOST_PANELS - 1) / MOST_PANELS) * words;
    const int64_t step = (prefetch.bytes + steps - 1) / steps;
    return {prefetch.next, step < 64 ? step : 64};
}

// Multiplies in blocks of rows of nearly equal size, all of them by the panels that are in the cache.
template <class T>
static void multiply_vectors(const T* a, int64_t lda, int rows, const T* b, int panels, int64_t depth, float* c,
                             int64_t ldc, const Prefetch& prefetch) {
    constexpr int64_t MOST_DEPTH = MOST_DEPTH_BYTES / sizeof(T);
    const int blocks = (rows + MOST_ROWS - 1) / MOST_ROWS, most_panels = blocks > 1 ? MOST_PANELS : panels;
    NextLines next = share_lines(prefetch, blocks, panels, depth / Pack<T>, b);
    for (int64_t k = 0; k < depth; k += MOST_DEPTH) {
        const int64_t size = depth - k < MOST_DEPTH ? depth - k : MOST_DEPTH;
        for (int p = 0; p < panels; p += most_panels) {
            const int width = panels - p < most_panels ? panels - p : most_panels;
            const T* part = b + p * depth * LANES + k * LANES;
            for (int i = 0, r = 0; i < blocks; i++) {
                const int end = rows * (i + 1) / blocks;
                multiply_panels(a + r * lda + k, lda, end - r, part, width, depth * LANES, size, k > 0, next,
                                c + r * ldc + p * LANES, ldc);
                r = end;
            }
        }
    }
}

#if !defined(CHAIRLIFT_MULTIPLIES_BF16)
// Rows are widened to float once for all columns, and weights in registers.
static void multiply_vectors(const bf16* a, int64_t lda, int rows, const bf16* b, int panels, int64_t depth, float* c,
                             int64_t ldc, const Prefetch& prefetch) {
    constexpr int64_t MOST_DEPTH = 1024;            // so that widened rows stay in the first two levels of the cache
    constexpr int64_t STRIDE = MOST_DEPTH + LANES;  // rows a power of 2 apart would compete for few cache lines
    alignas(64) float wide[MOST_ROWS * STRIDE];
    const int blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    NextLines next = share_lines(prefetch, blocks, panels, depth / Pack<bf16>, b);
    for (int i = 0, first = 0; i < blocks; i++) {
        const int end = rows * (i + 1) / blocks;
        for (int64_t start = 0; start < depth; start += MOST_DEPTH) {
            const int64_t size = depth - start < MOST_DEPTH ? depth - start : MOST_DEPTH;
            for (int r = 0; r < end - first; r++)
                for (int64_t k = 0; k < size; k += LANES)
                    store16(wide + r * STRIDE + k, load16(a + (first + r) * lda + start + k));
            multiply_panels(wide, STRIDE, end - first, b + start * LANES, panels, depth * LANES, size, start > 0, next,
                            c + first * ldc, ldc);
        }
        first = end;
    }
}
#endif
