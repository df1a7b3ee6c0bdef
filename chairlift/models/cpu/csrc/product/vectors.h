// The product in vectors, on any machine: registers hold the sums of ROWS x PANELS vectors of C.
#pragma once

#include "multiply_add.h"
#include "panel.h"
#include "prefetch.h"

constexpr int64_t MOST_DEPTH = 1024;  // at a time, so that rows of it stay in the first two levels of the cache

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12, MOST_PANELS = 2, FEW_ROWS = 4, FEW_ROWS_PANELS = 4;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 5, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 4;
#elif defined(__aarch64__)
constexpr int MOST_ROWS = 5, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 2;
#else
constexpr int MOST_ROWS = 2, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 2;
#endif

// Where the next lines are prefetched: the address advances by `step` bytes for each vector of a panel, and there is
// one such address per panel.
struct NextLines {
    const char* from;
    int64_t step;
};

// Multiplies `depth` elements of rows of A and of panels that are `panel_size` elements apart; `is_more`: adds to C.
template <int ROWS, int PANELS, class A, class T>
INLINE void multiply_block(const A* a, int64_t lda, const T* b, int64_t panel_size, int64_t depth, bool is_more,
                           NextLines next, float* c, int64_t ldc) {
    f32x16 sum[ROWS][PANELS] = {};
    if (is_more)
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) sum[r][p] = load16(c + r * ldc + p * LANES);
    for (int64_t k = 0; k < depth; k += Pack<T>, next.from += next.step) {
        typename Factor<T>::type words[PANELS];
        for (int p = 0; p < PANELS; p++) {
            const T* from = b + p * panel_size + k * LANES;
            words[p] = load<typename Factor<T>::type>(from);
            __builtin_prefetch((const char*)from + PREFETCH_BYTES);
            if (ROWS > FEW_ROWS) __builtin_prefetch(next.from + p * panel_size * int64_t(sizeof(T)), 0, 2);
        }
        add_products<0, Pack<T>>(sum, a + k, lda, words);
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store16(c + r * ldc + p * LANES, sum[r][p]);
}

// Multiplies `rows` rows, up to MOST_ROWS, with one instance of the block for each number.
template <int ROWS, int PANELS, class A, class T>
INLINE void multiply_rows(int rows, const A* a, int64_t lda, const T* b, int64_t panel_size, int64_t depth,
                          bool is_more, NextLines next, float* c, int64_t ldc) {
    if (rows == ROWS)
        multiply_block<ROWS, PANELS>(a, lda, b, panel_size, depth, is_more, next, c, ldc);
    else if constexpr (ROWS > 1)
        multiply_rows<ROWS - 1, PANELS>(rows, a, lda, b, panel_size, depth, is_more, next, c, ldc);
}

// C [rows, 16 panels] (row stride ldc) = A [rows, depth] (row stride lda) B, or adds that to C: up to MOST_ROWS rows.
template <class A, class T>
static void multiply_panels(const A* a, int64_t lda, int rows, const T* b, int panels, int64_t panel_size,
                            int64_t depth, bool is_more, NextLines next, float* c, int64_t ldc) {
    for (int p = 0; p < panels;) {
        const T* part = b + p * panel_size;
        const NextLines own{next.from + p * panel_size * int64_t(sizeof(T)), next.step};
        const bool is_wide = rows <= FEW_ROWS && panels - p >= FEW_ROWS_PANELS;
        const int width = is_wide ? FEW_ROWS_PANELS : panels - p >= MOST_PANELS ? MOST_PANELS : 1;
        float* to = c + p * LANES;
        if (is_wide)
            multiply_rows<FEW_ROWS, FEW_ROWS_PANELS>(rows, a, lda, part, panel_size, depth, is_more, own, to, ldc);
        else if (width == MOST_PANELS)
            multiply_rows<MOST_ROWS, MOST_PANELS>(rows, a, lda, part, panel_size, depth, is_more, own, to, ldc);
        else
            multiply_rows<MOST_ROWS, 1>(rows, a, lda, part, panel_size, depth, is_more, own, to, ldc);
        p += width;
    }
}

// Multiplies a part of the depth; the rows need no conversion.
template <class T>
INLINE void multiply_part(const T* a, int64_t lda, int rows, const T* b, int panels, int64_t panel_size, int64_t depth,
                          bool is_more, NextLines next, float* c, int64_t ldc) {
    multiply_panels(a, lda, rows, b, panels, panel_size, depth, is_more, next, c, ldc);
}

#if !defined(CHAIRLIFT_MULTIPLIES_BF16)
// Rows are widened to float once for all columns, and weights in registers.
INLINE void multiply_part(const bf16* a, int64_t lda, int rows, const bf16* b, int panels, int64_t panel_size,
                          int64_t depth, bool is_more, NextLines next, float* c, int64_t ldc) {
    constexpr int64_t STRIDE = MOST_DEPTH + LANES;  // rows a power of 2 apart would compete for few cache lines
    alignas(64) float wide[MOST_ROWS * STRIDE];
    for (int r = 0; r < rows; r++)
        for (int64_t k = 0; k < depth; k += LANES) store16(wide + r * STRIDE + k, load16(a + r * lda + k));
    multiply_panels(wide, STRIDE, rows, b, panels, panel_size, depth, is_more, next, c, ldc);
}
#endif

// Multiplies in blocks of rows of nearly equal size, and of the depth. With several blocks of rows, the first waits for
// memory and the others compute, so each of them prefetches a share of the next weights.
template <class T>
static void multiply_vectors(const T* a, int64_t lda, int rows, const T* b, int panels, int64_t depth, float* c,
                             int64_t ldc, const Prefetch& prefetch) {
    const int blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t panel_size = depth * LANES, step = prefetch.is_first && blocks > 1 ? (64 + blocks - 1) / blocks : 0;
    for (int i = 0, r = 0; i < blocks; i++) {
        const int end = rows * (i + 1) / blocks;
        for (int64_t k = 0; k < depth; k += MOST_DEPTH) {
            const int64_t size = depth - k < MOST_DEPTH ? depth - k : MOST_DEPTH;
            const T* part = b + k * LANES;
            const char* next = step ? prefetch.next + (i * depth + k) * 64 / Pack<T> / blocks : (const char*)part;
            multiply_part(a + r * lda + k, lda, end - r, part, panels, panel_size, size, k > 0, {next, step},
                          c + r * ldc, ldc);
        }
        r = end;
    }
}
