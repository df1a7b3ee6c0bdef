// The product C = A B, which takes almost all of the time. B is in panels; panel.h draws one.
//
// Each element of C is one chain of additions over the depth, whatever the number of rows: results do not depend on
// what else is in the batch.
#pragma once

#include "tiles.h"
#include "vectors.h"

#if defined(__AMX_TILE__)

#include "amx.h"

template <class T> constexpr bool HAS_TILES = std::is_same_v<T, bf16>;

static void multiply(const float* a, int64_t lda, int rows, const float* b, int panels, int64_t depth, float* c,
                     int64_t ldc, Prefetch = {}) {
    multiply_vectors(a, lda, rows, b, panels, depth, c, ldc, {});
}

#else

template <class T> constexpr bool HAS_TILES = false;

template <class T>
static void multiply(const T* a, int64_t lda, int rows, const T* b, int panels, int64_t depth, float* c, int64_t ldc,
                     Prefetch prefetch = {}) {
    multiply_vectors(a, lda, rows, b, panels, depth, c, ldc, prefetch);
}

#endif
